"""The peak memory of tensors on each accelerator during a block, from torch's allocators."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """The peak of one accelerator.

    Attributes:
        device: The name that torch gives the device, such as "cuda:0".
        peak_bytes: The peak memory of tensors during the block, in bytes.
        before_bytes: The memory of tensors when the block began.
        reserved_bytes: The peak memory that the allocator reserved, cache included.
    """

    device: str
    peak_bytes: int
    before_bytes: int
    reserved_bytes: int


def begin_device_peaks() -> tuple[DevicePeak, ...]:
    """Reset the allocators' peaks and return what each accelerator holds now; nothing without an accelerator.

    The counters change when memory is allocated, not when kernels run, so this call does not wait for the device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ()
    peaks: list[DevicePeak] = []
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.reset_peak_memory_stats(index)
        held, reserved = torch.accelerator.memory_allocated(index), torch.accelerator.memory_reserved(index)
        device = f"{accelerator.type}:{index}"
        peaks.append(DevicePeak(device=device, peak_bytes=held, before_bytes=held, reserved_bytes=reserved))
    return tuple(peaks)


def read_device_peaks(begun: tuple[DevicePeak, ...]) -> tuple[DevicePeak, ...]:
    """Return the peaks, raised to the allocators' counters."""
    read, read_reserved = torch.accelerator.max_memory_allocated, torch.accelerator.max_memory_reserved
    return tuple(_raise(peak, read(index), read_reserved(index)) for index, peak in enumerate(begun))


def including(outer: tuple[DevicePeak, ...], inner: tuple[DevicePeak, ...]) -> tuple[DevicePeak, ...]:
    """Return the peaks of an outer measurement, raised to those of an inner measurement."""
    pairs = zip(outer, inner, strict=True)
    return tuple(_raise(peak, within.peak_bytes, within.reserved_bytes) for peak, within in pairs)


def _raise(peak: DevicePeak, peak_bytes: int, reserved_bytes: int) -> DevicePeak:
    peak_bytes, reserved_bytes = max(peak.peak_bytes, peak_bytes), max(peak.reserved_bytes, reserved_bytes)
    return replace(peak, peak_bytes=peak_bytes, reserved_bytes=reserved_bytes)
