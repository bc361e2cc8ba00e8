"""The bytes of fetched weights that a device may hold at once, and those that it holds."""

from collections import deque
from typing import Protocol

import torch


class Completion(Protocol):
    """An operation that a device runs asynchronously: an event, or copies that nothing uses."""

    def query(self) -> bool:
        """Return whether the operation is done."""
        ...

    def synchronize(self) -> None:
        """Wait until the operation is done."""
        ...


class TransferWindow:
    """The transfer window of one device. Callers hold the engine's lock.

    An accelerator runs behind the host: memory that the host releases is free once the device has done all work that
    was enqueued before.

    Args:
        device: The device that computes.
        window_bytes: The most bytes of fetched weights on the device at once.
    """

    def __init__(self, device: torch.device, window_bytes: int) -> None:
        self._device = device
        self._window_bytes = window_bytes
        self._reserved_bytes = 0
        # The bytes that the host has released, while the device may still compute with them or copy to them.
        self._released: deque[tuple[Completion, int]] = deque()

    def fits(self, size_bytes: int) -> bool:
        """Return whether the window has room for this many more bytes now."""
        while self._released and self._released[0][0].query():
            self._reserved_bytes -= self._released.popleft()[1]
        return self._reserved_bytes + size_bytes <= self._window_bytes

    def wait_for(self, size_bytes: int) -> bool:
        """Wait for released memory until this many more bytes fit or none is left; return whether it waited."""
        waited = False
        while not self.fits(size_bytes) and self._released:
            self._released[0][0].synchronize()
            waited = True
        return waited

    def reserve(self, size_bytes: int) -> None:
        """Add bytes to those that the device holds."""
        self._reserved_bytes += size_bytes

    def release(self, size_bytes: int, cancelled: Completion | None = None) -> None:
        """Release memory that nothing refers to any more; the caller is the thread that computed with it.

        Args:
            size_bytes: The bytes to release.
            cancelled: The copies into the memory, if nothing has used them.
        """
        if self._device.type == "cpu":
            self._reserved_bytes -= size_bytes
            return
        if cancelled is None:
            # Recorded after the memory was freed: once it has happened, torch's allocator can reuse that memory.
            cancelled = event = torch.Event(self._device)
            event.record(torch.accelerator.current_stream(self._device))
        self._released.append((cancelled, size_bytes))


def default_windows(units: list[tuple[str, torch.device, int]]) -> dict[torch.device, int]:
    """Return the default window of each device in bytes: the largest three consecutive units there.

    Units that enclose the first of the three are in use with it, and count too. Pure.

    Args:
        units: The name, the device and the bytes of each unit, in the expected order.
    """
    windows: dict[torch.device, int] = {}
    for device in dict.fromkeys(device for _, device, _ in units):
        sizes = [(name, size_bytes) for name, at, size_bytes in units if at == device]
        enclosing: list[tuple[str, int]] = []
        for index, (name, size_bytes) in enumerate(sizes):
            while enclosing and not name.startswith(enclosing[-1][0]):
                enclosing.pop()
            held = sum(size for _, size in enclosing) + sum(size for _, size in sizes[index : index + 3])
            windows[device] = max(windows.get(device, 0), held)
            enclosing.append((f"{name}." if name else "", size_bytes))
    return windows
