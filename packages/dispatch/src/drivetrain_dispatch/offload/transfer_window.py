"""The bytes of fetched weights that a device may hold at once, and those that it holds."""

from collections import deque
from typing import NamedTuple, Protocol

import torch


class Done(Protocol):
    """An operation that a device runs asynchronously."""

    def query(self) -> bool:
        """Return whether the operation is done."""
        ...

    def synchronize(self) -> None:
        """Wait until the operation is done."""
        ...


class _Leaving(NamedTuple):
    """The memory that the host has released, while the device may still compute with it or copy to it."""

    event: Done
    size_bytes: int


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
        self._held_bytes = 0
        self._leaving: deque[_Leaving] = deque()

    def fits(self, size_bytes: int) -> bool:
        """Return whether the window has room for this many more bytes now."""
        while self._leaving and self._leaving[0].event.query():
            self._held_bytes -= self._leaving.popleft().size_bytes
        return self._held_bytes + size_bytes <= self._window_bytes

    def wait_for(self, size_bytes: int) -> bool:
        """Wait for released memory until this many more bytes fit or none is left; return whether it waited."""
        waited = False
        while not self.fits(size_bytes) and self._leaving:
            self._leaving[0].event.synchronize()
            waited = True
        return waited

    def take(self, size_bytes: int) -> None:
        """Add bytes to those that the device holds."""
        self._held_bytes += size_bytes

    def give_back(self, size_bytes: int, copied: Done | None = None) -> None:
        """Release memory that nothing refers to any more; the caller is the thread that computed with it.

        Args:
            size_bytes: The bytes to release.
            copied: The copy into the memory, if nothing has used it.
        """
        if self._device.type == "cpu":
            self._held_bytes -= size_bytes
            return
        if copied is not None:
            self._leaving.append(_Leaving(copied, size_bytes))
            return
        # Recorded after the memory was freed: once it has happened, torch's allocator can reuse that memory.
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        self._leaving.append(_Leaving(event, size_bytes))


def usual_windows(units: list[tuple[str, torch.device, int]]) -> dict[torch.device, int]:
    """Return the default window of each device in bytes: the largest three consecutive units there.

    Units that enclose the first of the three are in use with it, and count too. Pure.

    Args:
        units: The name, the device and the bytes of each unit, in the expected order.
    """
    windows: dict[torch.device, int] = {}
    for device in dict.fromkeys(device for _, device, _ in units):
        sizes = [(name, size_bytes) for name, at, size_bytes in units if at == device]
        around: list[tuple[str, int]] = []
        for index, (name, size_bytes) in enumerate(sizes):
            while around and not name.startswith(around[-1][0]):
                around.pop()
            held = sum(size for _, size in around) + sum(size for _, size in sizes[index : index + 3])
            windows[device] = max(windows.get(device, 0), held)
            around.append((f"{name}." if name else "", size_bytes))
    return windows
