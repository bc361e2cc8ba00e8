"""A guard that warns before the kernel ends the process for lack of memory."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from drivetrain_memory.breakdown.memory_shares import MemoryBreakdown
from drivetrain_memory.report.quantities import bytes_text
from drivetrain_memory.usage.memory_cgroup import (
    CGROUP_ROOT,
    CgroupFiles,
    CgroupUsage,
    find_cgroups,
    read_cgroup,
)
from drivetrain_memory.usage.processes import PROC

_logger = logging.getLogger(__name__)
_REARM = 0.05  # held memory falls by this part of the limit below the threshold before another warning
_NUM_NAMED = 5


class MemoryGuard:
    """A thread that watches the limit of this job's control group.

    Near the limit the thread logs a warning that lists what holds memory. With `stop_at` it also sets `should_stop`.
    A training loop reads that attribute at each step, and saves a checkpoint before the kernel ends the process.
    Memory that the kernel can drop, such as written pages of files, does not count.

    The guard reads the group's size, which is cheap, and its statistics only when the size with all cache is near the
    limit. An allocation that goes from below the threshold past the limit between two checks is not caught. Without a
    limit it does nothing. Create a guard on each rank. To stop all ranks after the same step, pass as `on_stop` a
    function by which they agree, such as `Accelerator.request_stop`.

    Args:
        warn_at: The part of the limit at which it warns; again only after held memory fell by 5 % of the limit.
        stop_at: The part of the limit at which `should_stop` becomes true; None for never.
        on_stop: A function that the guard's thread calls once, with the reason as text, when `should_stop` becomes
            true.
        interval_seconds: The time between two checks.
        describe: A function that returns what holds memory, such as `lambda: memory_breakdown(model, optimizer)`. The
            guard's thread calls it once for each warning.

    Raises:
        ValueError: A threshold is not above 0 and at most 1, the interval is not positive, or `on_stop` is given
            without `stop_at`.
        TypeError: `on_stop` or `describe` cannot be called.

    Example:
        >>> with MemoryGuard(stop_at=0.95) as guard:
        ...     for step in range(3):
        ...         if guard.should_stop:
        ...             break
    """

    def __init__(
        self,
        *,
        warn_at: float = 0.9,
        stop_at: float | None = None,
        on_stop: Callable[[str], object] | None = None,
        interval_seconds: float = 0.1,
        describe: Callable[[], MemoryBreakdown] | None = None,
        cgroup_root: Path = CGROUP_ROOT,
        proc: Path = PROC,
    ) -> None:
        for name, value in (("warn_at", warn_at), ("stop_at", stop_at)):
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name}={value!r}: give a part of the limit above 0 and at most 1")
        if not interval_seconds > 0:
            raise ValueError(f"interval_seconds={interval_seconds!r}: must be above 0")
        if on_stop is not None and stop_at is None:
            raise ValueError("on_stop without stop_at: say at which part of the limit, such as stop_at=0.95")
        for name, function in (("on_stop", on_stop), ("describe", describe)):
            if function is not None and not callable(function):  # the guard's thread calls it, hours later
                raise TypeError(f"{name}={function!r}: give a function")
        self.should_stop = False
        self._warn_at, self._stop_at, self._on_stop = warn_at, stop_at, on_stop
        self._interval_seconds, self._describe = interval_seconds, describe
        self._groups = tuple(
            group for group in find_cgroups(root=cgroup_root, proc=proc) if group.limit_bytes is not None
        )
        self._is_armed = True
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def limit_bytes(self) -> int | None:
        """The smallest limit of the groups that this process is in, in bytes; None without one."""
        return min((group.limit_bytes for group in self._groups if group.limit_bytes), default=None)

    def check(self) -> CgroupUsage | None:
        """Check the memory once, now; warn or set `should_stop` if a threshold is passed.

        Return the usage of the group that is nearest to its limit; None if no group is near its limit.
        """
        least = min(self._warn_at, self._stop_at or 1.0)
        near = [usage for group in self._groups if (usage := _usage_above(group, least - _REARM)) is not None]
        usage = max(near, key=lambda one: one.held_fraction, default=None)
        if usage is None or usage.held_fraction < self._warn_at - _REARM:
            self._is_armed = True
        if usage is None:
            return None
        if self._stop_at is not None and usage.held_fraction >= self._stop_at and not self.should_stop:
            self.should_stop = True
            if self._on_stop is not None:
                self._on_stop(f"{usage.held_fraction:.0%} of this job's memory limit is held")
        if self._is_armed and usage.held_fraction >= self._warn_at:
            self._is_armed = False
            _logger.warning("%s", describe_usage(usage, self._breakdown()))
        return usage

    def start(self) -> None:
        """Start the thread, once. `with guard:` does the same, and stops the thread after the block."""
        if self._thread is not None:
            raise RuntimeError("this guard was started before: make another")
        self._thread = threading.Thread(target=self._run, name="drivetrain-memory-guard", daemon=True)
        if self._groups:
            self._thread.start()

    def stop(self) -> None:
        """End the thread; `should_stop` keeps its value."""
        self._ended.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _breakdown(self) -> MemoryBreakdown | None:
        if self._describe is None:
            return None
        try:
            return self._describe()
        except Exception:  # the user's function, in the midst of a step; the warning must still come
            _logger.warning("what holds memory could not be described", exc_info=True)
            return None

    def _run(self) -> None:
        while not self._ended.wait(self._interval_seconds):
            try:
                self.check()
            except OSError:
                _logger.warning("this job's memory limit cannot be read; the guard ends here", exc_info=True)
                return


def describe_usage(usage: CgroupUsage, breakdown: MemoryBreakdown | None) -> str:
    """Return the text of a warning: how near the limit is, and what holds memory."""
    limit = usage.limit_bytes or 0
    lines = [
        f"{usage.held_fraction:.0%} of this job's memory limit is held: {bytes_text(usage.held_bytes)} of "
        f"{bytes_text(limit)}. The kernel ends a process when it cannot free enough.",
        f"  page cache beside it: {bytes_text(usage.cache_bytes)}, of which the kernel can drop "
        f"{bytes_text(usage.droppable_bytes)}",
    ]
    if breakdown is not None:
        largest = sorted(breakdown.totals.items(), key=lambda item: -item[1])
        kinds = [f"{kind.replace('_', ' ')} {bytes_text(size)}" for kind, size in largest if size]
        modules = [
            f"{module.name or '(the model)'} {bytes_text(module.total)}"
            for module in breakdown.largest(_NUM_NAMED)
        ]
        host = breakdown.by_device.get("cpu", {})
        lines += [
            f"  tensors: {', '.join(kinds)}",
            f"  of these on the host: {bytes_text(sum(host.values()))}",
            f"  largest modules: {', '.join(modules) or 'none'}",
        ]
    return "\n".join(lines)


def _usage_above(group: CgroupFiles, fraction: float) -> CgroupUsage | None:
    """Return the usage of a group whose size, cache included, is above a part of its limit; None otherwise."""
    try:
        current = int(group.current_file.read_bytes())
    except OSError:
        return None
    if group.limit_bytes is None or current < fraction * group.limit_bytes:
        return None
    return read_cgroup(group)
