"""How many bytes of coming weights a device may hold at once, and how many it does."""

from collections import deque
from typing import NamedTuple, Protocol

import torch


class Done(Protocol):
    """Something that the device does in its own time."""

    def query(self) -> bool:
        """Whether it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class _Leaving(NamedTuple):
    """Memory that the host has given back while the device may still compute with it, or copy to it."""

    event: Done
    size_bytes: int


class Room:
    """The window of one device. Whoever calls holds the lock of the model's engine.

    An accelerator works behind the host: what the host gives back is free once the device is through with all that
    was asked of it until then.

    Args:
        device: That computes.
        window_bytes: What may be there at once.
    """

    def __init__(self, device: torch.device, window_bytes: int) -> None:
        self._device = device
        self._window_bytes = window_bytes
        self._held_bytes = 0
        self._leaving: deque[_Leaving] = deque()

    def fits(self, size_bytes: int) -> bool:
        """Whether so much more may come now."""
        while self._leaving and self._leaving[0].event.query():
            self._held_bytes -= self._leaving.popleft().size_bytes
        return self._held_bytes + size_bytes <= self._window_bytes

    def wait_for(self, size_bytes: int) -> bool:
        """Wait for what is leaving until so much more fits, or nothing is leaving; whether that took any waiting."""
        waited = False
        while not self.fits(size_bytes) and self._leaving:
            self._leaving[0].event.synchronize()
            waited = True
        return waited

    def take(self, size_bytes: int) -> None:
        """So much more comes."""
        self._held_bytes += size_bytes

    def give_back(self, size_bytes: int, copied: Done | None = None) -> None:
        """So much is needed no more, and nobody holds it; the thread that calls is the one that computed with it.

        Args:
            size_bytes: How much.
            copied: What has asked for it, if nobody has used it.
        """
        if self._device.type == "cpu":
            self._held_bytes -= size_bytes
            return
        if copied is not None:
            self._leaving.append(_Leaving(copied, size_bytes))
            return
        # Recorded after the memory was let go: when it has happened, torch's allocator lends that memory again.
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        self._leaving.append(_Leaving(event, size_bytes))


def usual_windows(units: list[tuple[str, torch.device, int]]) -> dict[torch.device, int]:
    """The window of each device where a map says none: the largest three units that follow each other there.

    Those that are in use around the first of the three count too. Pure.

    Args:
        units: The name, the device and the bytes of each, in the order in which they are expected.
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
