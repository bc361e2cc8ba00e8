"""Measure this machine's link and disk rates in less than a second, and cache them."""

import json
import logging
import math
import mmap
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from drivetrain_dispatch.planning.pipeline_model import Bandwidths
from drivetrain_weights.regular_file import read_json

_SECONDS = 0.15  # for each measurement
_COPIED_BYTES = 64 * 2**20  # more than processor caches hold
_WRITTEN_BYTES = 32 * 2**20
_PIECE_BYTES = 4 * 2**20  # of a file per read
_NUM_READERS = 4  # a disk is fastest with several requests in flight
_LOG = logging.getLogger(__name__)
# The cache folder of each platform, relative to the home folder.
_FOLDERS = {"darwin": Path("Library/Caches"), "win32": Path("AppData/Local")}


def measure_rates(
    device: torch.device | str | int, *, disk_path: Path | str | None = None, cache: Path | None = None
) -> Bandwidths:
    """Measure the transfer rates from the host's memory to a device, and from the disk to the host's memory.

    The link is measured once per machine, device and torch version, the disk once per machine and file system; later
    calls read the cache. The disk is measured by reading `disk_path`, past the page cache where possible, or a
    temporary file of 32 MiB if that is a folder.
    """
    place, kept = torch.device(device), cache or default_cache()
    found = kept.parent if disk_path is None else Path(disk_path).expanduser()
    if disk_path is None:
        found = next(folder for folder in (found, *found.parents) if folder.is_dir())
    if not found.exists():
        raise ValueError(
            f"disk_path={str(disk_path)!r} is missing: name a file to read, or a folder to write to"
        )
    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if place.type != "cpu":
        module = torch.get_device_module(place)
        name = str(module.get_device_name(place)) if hasattr(module, "get_device_name") else place.type
    machine = ("link", platform.node(), place.type, name, torch.__version__)
    (link,) = remembered(kept, machine, ["bytes_per_second"], lambda: [_link(place)])
    disk = ("disk", platform.node(), str(found.stat().st_dev))
    (read,) = remembered(kept, disk, ["bytes_per_second"], lambda: [_disk(found)])
    return Bandwidths(to_device=link, from_disk=read)


def _link(device: torch.device) -> float:
    """Return the bytes per second from the host's memory to a device."""
    pinned = device.type not in ("cpu", "mps")
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, pin_memory=pinned)
    target = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < 2 or time.perf_counter() - begun < _SECONDS:
        start = time.perf_counter()
        target.copy_(source, non_blocking=pinned)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    # The first run warms up; a coarse clock may report no time at all.
    return _COPIED_BYTES / max(min(taken[1:]), 1e-9)


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


def default_cache() -> Path:
    """Return the default file that caches measured rates."""
    return Path.home() / _FOLDERS.get(sys.platform, Path(".cache")) / "drivetrain" / "rates.json"


def remembered(
    cache: Path, what: Sequence[str], names: Sequence[str], measure: Callable[[], Sequence[float]]
) -> list[float]:
    """Return cached numbers, or measure and cache them.

    A damaged file counts as missing and is replaced atomically. If the file cannot be written, each call measures
    again.
    """
    key = json.dumps(list(what))
    known = _read(cache).get(key, {})
    if all(name in known for name in names):
        return [known[name] for name in names]
    found = dict(zip(names, measure(), strict=True))
    # Read again: another process may have written during the measurement.
    _write(cache, {**_read(cache), key: found})
    return list(found.values())


def _read(cache: Path) -> dict[str, dict[str, float]]:
    """Return the valid entries of the file; none if it is missing or damaged."""
    try:
        said: object = read_json(cache)
    except (OSError, ValueError):
        return {}
    if not isinstance(said, Mapping):
        return {}
    return {
        key: dict(numbers)
        for key, numbers in said.items()
        if isinstance(numbers, Mapping)
        and all(type(one) in (int, float) and math.isfinite(one) and one > 0 for one in numbers.values())
    }


def _write(cache: Path, numbers: Mapping[str, Mapping[str, float]]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=cache.parent, prefix=f".{cache.name}.", delete=False
        ) as file:
            file.write(json.dumps(numbers, indent=1))
        try:
            os.replace(file.name, cache)
        except OSError:
            os.unlink(file.name)
            raise
    except OSError as error:
        _LOG.info("measured rates are not kept: %s", error)
