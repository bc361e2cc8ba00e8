"""Batches on their way to the device before the loop asks for them.

Where the device has streams, batches are copied on one of its own, so that a copy from pinned memory runs while the
loop computes; the loop's stream waits for the copy alone. What a step moves is counted when the loop has it.
"""

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from drivetrain_data._nested import Nested, map_leaves, to_device
from drivetrain_data.sources.base import Reading


class _Copied(NamedTuple):
    """A reading whose batch is on its way.

    Attributes:
        reading: It, with the batch on the device.
        done: When the copy is made; None where the loop's own stream makes it.
    """

    reading: Reading
    done: Any


class DeviceCopies:
    """Copies of batches on a device.

    Args:
        device: Where.
        non_blocking: Copy pinned memory without waiting.
        num_ahead: The copies that are made before the loop asks for them; each holds its memory.
    """

    def __init__(self, device: torch.device, *, non_blocking: bool, num_ahead: int) -> None:
        self._device = device
        self._non_blocking = non_blocking
        self._num_ahead = num_ahead
        self._stream = _new_stream(device) if num_ahead else None

    def copied(self, readings: Iterator[Reading]) -> Generator[Reading]:
        """The same readings with their batches on the device. An error comes after the batches before it."""
        ahead: deque[_Copied] = deque()
        while True:
            try:
                reading = next(readings, None)
            except Exception:
                while ahead:
                    yield self._arrived(ahead.popleft())
                raise
            if reading is None:
                break
            ahead.append(self._start(reading))
            if len(ahead) > self._num_ahead:
                yield self._arrived(ahead.popleft())
        while ahead:
            yield self._arrived(ahead.popleft())

    def _start(self, reading: Reading) -> _Copied:
        plan, batch, mark = reading
        with nullcontext() if self._stream is None else self._stream:
            batch = to_device(batch, self._device, non_blocking=self._non_blocking)
        done = None if self._stream is None else self._stream.record_event()
        return _Copied((plan, batch, mark), done)

    def _arrived(self, copied: _Copied) -> Reading:
        """Let the loop's stream wait for the copy, and keep the memory until that stream is done with it."""
        if copied.done is not None:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(copied.done)
            _keep_for(stream, copied.reading[1])
        return copied.reading


def _new_stream(device: torch.device) -> Any:
    """A stream for copies; None where the device has no streams."""
    if not hasattr(getattr(torch, device.type, None), "Stream"):
        return None
    return torch.Stream(device)


def _keep_for(stream: Any, batch: Nested) -> None:
    def keep(leaf: Any) -> Any:
        if hasattr(leaf, "record_stream"):
            leaf.record_stream(stream)
        return leaf

    map_leaves(batch, keep)
