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

from drivetrain_dispatch.device_copies import copies_aside
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


def measure_rates(device: torch.device | str | int, *, cache: Path | None = None) -> Bandwidths:
    """Measure the transfer rates from the host's memory to a device, and from the disk to the host's memory.

    Later calls read the cache, by machine, device and torch version. The measured disk holds the cache's folder.
    """
    place, kept = torch.device(device), cache or default_cache()
    folder = next(folder for folder in kept.parents if folder.is_dir())
    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if place.type != "cpu":
        module = torch.get_device_module(place)
        name = str(module.get_device_name(place)) if hasattr(module, "get_device_name") else place.type
    machine = ("link", platform.node(), place.type, name, torch.__version__)
    disk = ("disk", platform.node(), str(folder.stat().st_dev))
    return Bandwidths(
        to_device=remembered(kept, machine, lambda: _link(place)),
        from_disk=remembered(kept, disk, lambda: _disk(folder)),
    )


def _link(device: torch.device) -> float:
    """Return the bytes per second from the host's memory to a device."""
    pinned = copies_aside(device.type)
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


def _disk(folder: Path) -> float:
    """Return the bytes per second at which a temporary file in a folder is read."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".drivetrain-rate-") as inside:
        path = Path(inside) / "read"
        with path.open("wb") as file:
            file.write(os.urandom(2**20) * (_WRITTEN_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
        direct = getattr(os, "O_DIRECT", 0)  # past the page cache
        try:
            return _read_rate(path, direct)
        except OSError:  # a file system without direct reads, such as tmpfs
            if not direct:
                raise
            return _read_rate(path, 0)


def _read_rate(path: Path, flags: int) -> float:
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


def remembered(cache: Path, what: Sequence[str], measure: Callable[[], float]) -> float:
    """Return a cached number, or measure and cache it; each call measures if the file cannot be written."""
    if (known := recalled(cache, what)) is not None:
        return known
    key, found = json.dumps(list(what)), measure()
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=cache.parent, prefix=f".{cache.name}.", delete=False
        ) as file:
            # Read again: another process may have written during the measurement.
            file.write(json.dumps({**_read(cache), key: found}, indent=1))
        try:
            os.replace(file.name, cache)
        except OSError:
            os.unlink(file.name)
            raise
    except OSError as error:
        _LOG.info("measured rates are not kept: %s", error)
    return found


def recalled(cache: Path, what: Sequence[str]) -> float | None:
    """Return a cached number; None if there is none."""
    return _read(cache).get(json.dumps(list(what)))


def _read(cache: Path) -> dict[str, float]:
    """Return the valid entries of the file; none if it is missing or damaged."""
    try:
        said: object = read_json(cache)
    except (OSError, ValueError):
        return {}
    if not isinstance(said, Mapping):
        return {}
    return {
        key: one for key, one in said.items() if type(one) in (int, float) and math.isfinite(one) and one > 0
    }
