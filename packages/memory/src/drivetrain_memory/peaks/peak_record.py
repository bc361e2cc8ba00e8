"""The peak memory of a block, from the counters of the kernel and of the accelerators' allocators."""

from contextvars import ContextVar
from pathlib import Path
from typing import Self

import torch

from drivetrain_memory.peaks.device_peak import DevicePeak, begin_device_peaks, including, read_device_peaks
from drivetrain_memory.peaks.host_peak import ChildPeak, HostPeak, HostPeakMeter
from drivetrain_memory.peaks.process_peak import PeakSource
from drivetrain_memory.usage.processes import PROC

# The innermost block being measured in this context. It records its peak before a nested block resets the counters.
_ENCLOSING: "ContextVar[PeakRecord | None]" = ContextVar("drivetrain_memory_enclosing_block", default=None)


def record_peak(*, children: bool = True) -> "PeakRecord":
    """Return a context manager that measures the peak memory of its block on the host and on each accelerator.

    The counters are those of the kernel and of torch's allocators, reset when the block begins: no peak is too short
    to be seen. Blocks may be nested in one thread; overlapping blocks in several threads disturb each other. Memory
    that other threads allocate during the block counts. Any rank may call this alone. With `children`, child
    processes count too, each with a separate peak. A block costs some 60 us without them, and 200 us or more with
    them.

    Example:
        >>> with record_peak() as peak:
        ...     buffer = bytes(50_000_000)
        >>> peak.host_bytes > 50_000_000
        True
    """
    return PeakRecord(children=children)


class PeakRecord:
    """The peak memory of a block; `record_peak` makes it.

    The kernel counts every page in memory. These include pages of files, such as the code of libraries, which it may
    drop at any time. A peak of the host is therefore an upper bound of what the block itself needs. Without the
    kernel's files in the folder `proc`, the portable counters are used.
    """

    def __init__(self, *, children: bool = True, proc: Path = PROC) -> None:
        self._counts_children, self._proc = children, proc
        self._host = HostPeak()
        self._devices: tuple[DevicePeak, ...] = ()
        self._meter: HostPeakMeter | None = None
        self._enclosing: PeakRecord | None = None

    @property
    def host(self) -> HostPeak:
        """The peaks of this process and its children, with their sources."""
        self._update()
        return self._host

    @property
    def host_bytes(self) -> int:
        """The peak resident memory of this process during the block, in bytes."""
        return self.host.peak_bytes

    @property
    def host_before_bytes(self) -> int:
        """The resident memory of this process at the start of the block, in bytes."""
        return self._host.before_bytes

    @property
    def host_source(self) -> PeakSource:
        """The source of `host_bytes`: "kernel" and "getrusage" are exact, "sampled" is a lower bound."""
        return self.host.source

    @property
    def children(self) -> tuple[ChildPeak, ...]:
        """The peak of each child process, and of their children.

        A child that began and ended within the block is not among them, unless an inner block saw it: see
        `ended_child_bytes`.
        """
        return self.host.children

    @property
    def ended_child_bytes(self) -> int | None:
        """The largest peak of a child that ended and was waited for in the block, in bytes.

        The system reports only the largest peak of all ended children, and a child's mark begins at its parent's. The
        value is therefore None unless this number rose in the block, above this process's own peak.
        """
        return self.host.ended_child_bytes

    @property
    def host_total_bytes(self) -> int:
        """The sum of the peaks of this process and its children, in bytes.

        An upper bound: peaks need not fall together, and pages that processes share count in each of them.
        """
        host = self.host
        return host.peak_bytes + sum(child.peak_bytes for child in host.children)

    @property
    def devices(self) -> tuple[DevicePeak, ...]:
        """The peak of each accelerator; empty without one."""
        self._update()
        return self._devices

    @property
    def device_bytes(self) -> int | None:
        """The peak memory of tensors on the current accelerator, in bytes; None without an accelerator."""
        return None if (device := self._current()) is None else device.peak_bytes

    @property
    def device_before_bytes(self) -> int | None:
        """The memory of tensors on the current accelerator at the start, in bytes; None without an accelerator."""
        return None if (device := self._current()) is None else device.before_bytes

    @property
    def device_reserved_bytes(self) -> int | None:
        """The peak memory that the current accelerator's allocator reserved, cache included, in bytes."""
        return None if (device := self._current()) is None else device.reserved_bytes

    def __enter__(self) -> Self:
        if self._meter is not None:
            raise RuntimeError(
                "this record measures a block already: call record_peak() again for a block within it"
            )
        self._enclosing = _ENCLOSING.get()
        if self._enclosing is not None:
            self._enclosing._update()  # before the counters are reset
        _ENCLOSING.set(self)
        self._devices = begin_device_peaks()
        self._meter = HostPeakMeter(children=self._counts_children, proc=self._proc)
        self._host = self._meter.read()
        return self

    def __exit__(self, *_: object) -> None:
        self._update()
        if _ENCLOSING.get() is self:  # not where another thread ends the block
            _ENCLOSING.set(self._enclosing)
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.stop()
            if self._enclosing is not None:
                enclosing = self._enclosing
                if enclosing._meter is not None:
                    enclosing._meter.include(meter)
                enclosing._devices = including(enclosing._devices, self._devices)
        self._enclosing = None

    def _update(self) -> None:
        """Raise the peaks to the counters, if the block is still running."""
        if self._meter is not None:
            self._host = self._meter.read()
            self._devices = read_device_peaks(self._devices)

    def _current(self) -> DevicePeak | None:
        devices = self.devices
        return devices[torch.accelerator.current_device_index()] if devices else None
