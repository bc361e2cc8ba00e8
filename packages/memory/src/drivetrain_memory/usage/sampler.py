"""A sampler of all sources: it returns a row of numbers, always in the same columns."""

import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from drivetrain_memory.usage.device_drivers import DriverPoller, DriversFound, find_drivers
from drivetrain_memory.usage.memory_cgroup import CgroupUsage, find_cgroups, read_cgroup
from drivetrain_memory.usage.processes import ProcessKey, ProcessReader, descendants_of

_CGROUP_COLUMNS = ("current_bytes", "held_bytes", "cache_bytes", "limit_bytes")
HOST_COLUMNS = (
    "host/resident_bytes",
    "host/shared_bytes",
    "host/proportional_bytes",
    "children/resident_bytes",
    "children/proportional_bytes",
    "children/count",
    "host/pinned_bytes",
    *(f"cgroup/{name}" for name in _CGROUP_COLUMNS),
)
_ALLOCATOR_COLUMNS = ("allocated_bytes", "reserved_bytes")
_DRIVER_COLUMNS = ("used_bytes", "total_bytes", "power_watts", "temperature_celsius", "utilization_percent")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """The times between two readings of expensive sources; in between, the last number is repeated.

    Attributes:
        children_seconds: For the list of child processes; a reading takes some 10 us for each thread.
        cgroup_seconds: For the control group; a reading takes some 50 us or more, as the kernel sums statistics up.
        drivers_seconds: For power, temperature and utilisation, which a separate thread reads.
        proportional_seconds: For proportional set sizes; the kernel walks all pages, some 10 ms for a GB.
    """

    children_seconds: float = 1.0
    cgroup_seconds: float = 0.5
    pinned_seconds: float = 1.0
    drivers_seconds: float = 1.0
    proportional_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be above 0 seconds")


class UsageSampler:
    """A reader of all known numbers about the memory of a process, its children and its devices."""

    def __init__(
        self,
        pid: int | None = None,
        *,
        settings: SamplerSettings | None = None,
        drivers: DriversFound | None = None,
    ) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._settings = SamplerSettings() if settings is None else settings
        self._process = ProcessReader(self.pid)
        self._children: dict[ProcessKey, ProcessReader] = {}
        self._cgroups = find_cgroups(self.pid)
        # Torch's numbers are those of the process that asks.
        self._devices = accelerator_names() if self.pid == os.getpid() else ()
        found = find_drivers() if drivers is None else drivers
        self.absent_drivers: Mapping[str, str] = found.absent
        self._poller = DriverPoller(found.drivers, interval_seconds=self._settings.drivers_seconds)
        self.models = {reading.device: reading.model for reading in self._poller.newest}
        self.columns: tuple[str, ...] = (
            *HOST_COLUMNS,
            *(f"{device}/{name}" for device in self._devices for name in _ALLOCATOR_COLUMNS),
            *(f"{device}/{name}" for device in self.models for name in _DRIVER_COLUMNS),
        )
        self._next: dict[str, float] = {}
        self._cgroup: CgroupUsage | None = None
        self._pinned: int | None = None
        self._proportional: tuple[int | None, int | None] = (None, None)

    def sample(self) -> list[float] | None:
        """Return the current numbers in the order of `columns`, NaN for unknown ones; None if the process ended."""
        now = time.monotonic()
        own = self._process.read()
        if own is None:
            return None
        if self._is_due("children", self._settings.children_seconds, now):
            living = descendants_of(self.pid)
            for key in self._children.keys() - set(living):
                self._children.pop(key).close()
            for key in living:
                if key not in self._children:
                    self._children[key] = ProcessReader(key.pid)
        children = [usage for reader in self._children.values() if (usage := reader.read()) is not None]
        if self._is_due("cgroup", self._settings.cgroup_seconds, now):
            used = [usage for group in self._cgroups if (usage := read_cgroup(group)) is not None]
            self._cgroup = max(used, key=lambda usage: usage.held_fraction, default=None)
        if self._is_due("pinned", self._settings.pinned_seconds, now):
            self._pinned = pinned_bytes() if self._devices else None
        if self._is_due("proportional", self._settings.proportional_seconds, now):
            of_children = [reader.proportional_bytes() for reader in self._children.values()]
            known = [size for size in of_children if size is not None]
            total = sum(known) if known or not of_children else None
            self._proportional = self._process.proportional_bytes(), total
        row: list[float | None] = [
            own.resident_bytes,
            own.shared_bytes,
            self._proportional[0],
            sum(usage.resident_bytes for usage in children),
            self._proportional[1],
            len(children),
            self._pinned,
            *(None if self._cgroup is None else getattr(self._cgroup, name) for name in _CGROUP_COLUMNS),
        ]
        for device in self._devices:
            row += read_allocator(device)
        for reading in self._poller.newest:
            row += [getattr(reading, name) for name in _DRIVER_COLUMNS]
        return [math.nan if value is None else float(value) for value in row]

    def close(self) -> None:
        """Close all files and drivers."""
        self._poller.close()
        for reader in (self._process, *self._children.values()):
            reader.close()

    def _is_due(self, name: str, interval_seconds: float, now: float) -> bool:
        if now < self._next.get(name, -math.inf):
            return False
        self._next[name] = now + interval_seconds
        return True


def accelerator_names() -> tuple[str, ...]:
    """Return the names of all accelerators that torch sees; empty if torch is not imported or sees none."""
    torch = _torch()
    kind = None if torch is None else torch.accelerator.current_accelerator(check_available=True)
    if torch is None or kind is None:
        return ()
    return tuple(f"{kind.type}:{index}" for index in range(torch.accelerator.device_count()))


def read_allocator(device: str) -> tuple[int, int]:
    """Return the bytes of tensors on an accelerator, and the bytes that its allocator holds, cache included."""
    torch = _torch()
    assert torch is not None
    # One call tells both numbers, without waiting for the device. It says nothing before the first tensor is there.
    stats = torch.accelerator.memory_stats(int(device.rpartition(":")[2]))
    return stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)


def pinned_bytes() -> int | None:
    """Return the pinned host memory that torch's allocator for CUDA holds; None if torch does not report it."""
    torch = _torch()
    if torch is None or not torch.cuda.is_initialized():
        return None
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", 0))  # the blocks that it owns, cached ones included


def _torch() -> ModuleType | None:
    """Return torch if this program has imported it, else None: watching from outside needs no torch."""
    return sys.modules.get("torch")
