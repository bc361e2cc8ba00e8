"""Measure this machine's link, disk and compute rates in less than a second, and cache them."""

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from drivetrain_dispatch.planning.bandwidth_cache import default_cache, remembered
from drivetrain_dispatch.planning.cost_model import ComputeRate
from drivetrain_dispatch.planning.pipeline_model import Bandwidths

_SECONDS = 0.15  # for each measurement
_COPIED_BYTES = 64 * 2**20  # more than processor caches hold
_WRITTEN_BYTES = 32 * 2**20
_PIECE_BYTES = 4 * 2**20  # of a file per read
_NUM_READERS = 4  # a disk is fastest with several requests in flight
_LARGEST = 8192  # the most rows of the multiplied matrices
_NUM_STARTS = 50


def measure_rates(
    device: torch.device | str | int,
    *,
    disk_path: Path | str | None = None,
    cache: Path | None = None,
) -> Bandwidths:
    """Measure the transfer rates from the host's memory to a device, and from the disk to the host's memory.

    The link is measured once per machine, device and torch version, the disk once per machine and file system; later
    calls read the cache.

    Args:
        device: The device that computes; `"cpu"` measures the rate of copies within the host's memory.
        disk_path: The file to read, bypassing the page cache where possible; or a folder in which a temporary file
            of 32 MiB is written and read. None for the folder of `cache`.
        cache: The file that caches the rates; None for one in the user's cache folder.

    Raises:
        ValueError: `disk_path` is missing, or a file that is too small.
    """
    place, kept = torch.device(device), cache or default_cache()
    found = kept.parent if disk_path is None else Path(disk_path).expanduser()
    if disk_path is None:
        found = next(folder for folder in (found, *found.parents) if folder.is_dir())
    if not found.exists():
        raise ValueError(
            f"disk_path={str(disk_path)!r} is missing: name a file to read, or a folder to write to"
        )
    (link,) = remembered(kept, ("link", *_machine(place)), ["bytes_per_second"], lambda: [_link(place)])
    disk = ("disk", platform.node(), str(found.stat().st_dev))
    (read,) = remembered(kept, disk, ["bytes_per_second"], lambda: [_disk(found)])
    return Bandwidths(to_device=link, from_disk=read)


def measure_compute(
    device: torch.device | str | int, dtype: torch.dtype = torch.float32, *, cache: Path | None = None
) -> ComputeRate:
    """Measure how fast a device multiplies matrices, accesses its memory and launches operations.

    Args:
        device: The device to measure.
        dtype: The dtype of the multiplied matrices.
        cache: The file that caches the rates; None for one in the user's cache folder.

    Raises:
        ValueError: The device does not multiply matrices of that dtype.
    """
    place = torch.device(device)
    names = ["flops_per_second", "bytes_per_second", "operation_seconds"]
    what = ("compute", *_machine(place), str(dtype))
    flops, size_bytes, start = remembered(
        cache or default_cache(), what, names, lambda: _compute(place, dtype)
    )
    return ComputeRate(flops_per_second=flops, bytes_per_second=size_bytes, operation_seconds=start)


def _machine(device: torch.device) -> tuple[str, ...]:
    """Return the properties of a machine and device that its rates depend on, as part of the cache's key."""
    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if device.type != "cpu":
        module = torch.get_device_module(device)
        name = str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    return (platform.node(), device.type, name, torch.__version__)


def _link(device: torch.device) -> float:
    """Return the bytes per second from the host's memory to a device."""
    pinned = device.type not in ("cpu", "mps")
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, pin_memory=pinned)
    target = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    return _COPIED_BYTES / _shortest(lambda: target.copy_(source, non_blocking=pinned), device)


def _compute(device: torch.device, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return FLOPs per second, bytes read and written per second, and the launch overhead in seconds."""
    rows = 128
    while True:
        matrix = _ones((rows, rows), device, dtype)
        seconds = _shortest(lambda matrix=matrix: matrix @ matrix, device, most_seconds=_SECONDS / 10)
        if seconds > _SECONDS / 50 or rows == _LARGEST:
            break
        rows *= 2
    seconds = _shortest(lambda: matrix @ matrix, device)
    source = torch.ones(
        4 * _COPIED_BYTES if device.type != "cpu" else _COPIED_BYTES, dtype=torch.uint8, device=device
    )
    target = torch.zeros_like(source)
    copied = _shortest(lambda: target.copy_(source), device)
    small = torch.zeros(1, device=device)

    def start() -> None:
        for _ in range(_NUM_STARTS):
            small.add_(1)

    return 2 * rows**3 / seconds, 2 * source.numel() / copied, _shortest(start, device) / _NUM_STARTS


def _ones(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a matrix of ones that the device can multiply.

    Raises:
        ValueError: The device cannot multiply matrices of that dtype.
    """
    try:
        matrix = torch.ones(shape, dtype=torch.float32, device=device).to(dtype)
        _ = matrix @ matrix
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"dtype={dtype}: {device} does not multiply matrices of it ({error}): measure with the dtype it computes "
            "in, such as torch.bfloat16"
        ) from error
    return matrix


def _shortest(work: Callable[[], object], device: torch.device, *, most_seconds: float = _SECONDS) -> float:
    """Return the shortest of several run times, in seconds; the first run warms up and does not count."""
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < 2 or time.perf_counter() - begun < most_seconds:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    return max(min(taken[1:]), 1e-9)  # a coarse clock may report no time at all


def _disk(path: Path) -> float:
    """Return the bytes per second at which a file is read, or a temporary file in a folder."""
    if path.is_file():
        return _read_rate(path)
    with tempfile.TemporaryDirectory(dir=path, prefix=".drivetrain-rate-") as folder:
        written = Path(folder) / "read"
        with written.open("wb") as file:
            file.write(os.urandom(2**20) * (_WRITTEN_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
        return _read_rate(written)


def _read_rate(path: Path) -> float:
    """Return the bytes per second of a file, bypassing the page cache if the file system supports it."""
    if path.stat().st_size < _PIECE_BYTES:
        raise ValueError(f"disk_path={str(path)!r} has less than {_PIECE_BYTES} bytes: name a larger file")
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return _read_rate_with(path, direct)
    except OSError:  # a file system without direct reads, such as tmpfs
        if not direct:
            raise
        return _read_rate_with(path, 0)


def _read_rate_with(path: Path, flags: int) -> float:
    num_pieces = path.stat().st_size // _PIECE_BYTES
    begun = time.perf_counter()

    def read(piece: int) -> int:
        if piece >= _NUM_READERS and time.perf_counter() - begun > _SECONDS:
            return 0
        # An anonymous mapping begins at a page boundary, which O_DIRECT requires.
        with (
            mmap.mmap(-1, _PIECE_BYTES) as memory,
            open(path, "rb", buffering=0, opener=lambda name, mode: os.open(name, mode | flags)) as file,
        ):
            file.seek(piece * _PIECE_BYTES)
            return file.readinto(memory)

    with ThreadPoolExecutor(_NUM_READERS) as readers:
        size_bytes = sum(readers.map(read, range(num_pieces)))
    return size_bytes / max(time.perf_counter() - begun, 1e-9)
