"""The peak memory of a block, from the counters of the kernel and of the accelerator's allocator."""

from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

import torch

from drivetrain_memory.resident_memory import peak_resident_bytes, reset_peak, resident_bytes

# The innermost block being measured in this context. It records its peak before a nested block resets the counters.
_ENCLOSING: "ContextVar[PeakMemory | None]" = ContextVar("drivetrain_memory_enclosing_block", default=None)


class PeakMemory:
    """A context manager that measures the peak memory of a block on the host and the current accelerator.

    The counters are those of the process: memory that other threads allocate during the block counts too. Blocks may
    be nested in one thread; overlapping blocks in several threads disturb each other.

    Example:
        >>> with PeakMemory() as memory:
        ...     buffer = bytes(50_000_000)
        >>> memory.host_bytes > 50_000_000
        True
    """

    def __init__(self) -> None:
        self._process_peak_before = self._host_before = self._host_peak = 0
        self._device_before = self._device_peak = self._device_reserved_peak = 0
        self._resets_host = False
        self._is_measuring = False
        self._enclosing: PeakMemory | None = None
        self._token: Token[PeakMemory | None] | None = None

    @property
    def host_bytes(self) -> int:
        """The peak resident host memory during the block, in bytes; inside the block, the peak so far."""
        self._update()
        return self._host_peak

    @property
    def host_before_bytes(self) -> int:
        """The resident host memory at the start of the block, in bytes."""
        return self._host_before

    @property
    def host_is_exact(self) -> bool:
        """True if `host_bytes` is the exact peak of the block.

        False if the system cannot reset its counter (not Linux, or a read-only /proc) and the process used more
        memory before the block than during it: `host_bytes` is then a lower bound, the larger of the resident memory
        at the start and at the end.
        """
        self._update()
        return self._resets_host or self._host_peak > self._process_peak_before

    @property
    def device_bytes(self) -> int | None:
        """The peak memory of tensors on the accelerator during the block, in bytes; None without an accelerator."""
        self._update()
        return self._device_peak if _has_accelerator() else None

    @property
    def device_before_bytes(self) -> int | None:
        """The memory of tensors on the accelerator at the start, in bytes; None without an accelerator."""
        return self._device_before if _has_accelerator() else None

    @property
    def device_reserved_bytes(self) -> int | None:
        """The peak memory reserved by the allocator, cache included, in bytes; None without an accelerator."""
        self._update()
        return self._device_reserved_peak if _has_accelerator() else None

    def __enter__(self) -> Self:
        if self._is_measuring:
            raise RuntimeError("this PeakMemory measures a block already: make another for a block within it")
        self._enclosing = _ENCLOSING.get()
        if self._enclosing is not None:
            self._enclosing._update()
        self._token = _ENCLOSING.set(self)
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._update()
        self._is_measuring = False
        if self._token is not None:
            _ENCLOSING.reset(self._token)
        if self._enclosing is not None:
            self._enclosing._include(self)

    def _begin(self) -> None:
        self._process_peak_before = peak_resident_bytes()
        self._resets_host = reset_peak()
        self._host_before = self._host_peak = resident_bytes()
        self._device_before = self._device_peak = self._device_reserved_peak = 0
        if _has_accelerator():
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            self._device_before = torch.accelerator.memory_allocated()
        self._is_measuring = True

    def _update(self) -> None:
        """Update the peaks from the counters, if the block is still running."""
        if not self._is_measuring:
            return
        process_peak = peak_resident_bytes()
        if self._resets_host or process_peak > self._process_peak_before:
            self._host_peak = max(self._host_peak, process_peak)
        self._host_peak = max(self._host_peak, resident_bytes())
        if _has_accelerator():
            self._device_peak = max(self._device_peak, torch.accelerator.max_memory_allocated())
            self._device_reserved_peak = max(
                self._device_reserved_peak, torch.accelerator.max_memory_reserved()
            )

    def _include(self, inner: "PeakMemory") -> None:
        self._host_peak = max(self._host_peak, inner._host_peak)
        self._device_peak = max(self._device_peak, inner._device_peak)
        self._device_reserved_peak = max(self._device_reserved_peak, inner._device_reserved_peak)


def _has_accelerator() -> bool:
    return torch.accelerator.current_accelerator(check_available=True) is not None
