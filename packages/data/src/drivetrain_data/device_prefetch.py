"""Prefetch batches to the device.

On a device with streams, a side stream copies the batches, so that copies from pinned memory overlap with
computation; the loop's stream waits only for the copy that it needs. The loader's position advances when the loop
receives a batch, not when its copy starts.
"""

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from drivetrain_data._nested import Nested, map_leaves, to_device
from drivetrain_data.sources.batch_source import Reading


class _Copied(NamedTuple):
    """A reading whose batch is being copied.

    Attributes:
        reading: The reading with its batch on the device.
        done: The event recorded after the copy; None if the loop's own stream makes the copy.
    """

    reading: Reading
    done: Any


class DeviceCopies:
    """A prefetcher that copies batches to a device.

    Args:
        device: The target device of the copies.
        non_blocking: Whether to copy pinned memory without waiting.
        num_ahead: The number of batches to copy before the loop asks for them; each occupies device memory.
    """

    def __init__(self, device: torch.device, *, non_blocking: bool, num_ahead: int) -> None:
        self._device = device
        self._non_blocking = non_blocking
        self._num_ahead = num_ahead
        self._stream = _new_stream(device) if num_ahead else None

    def copied(self, readings: Iterator[Reading]) -> Generator[Reading]:
        """Yield the readings with their batches on the device; raise an error only after the batches before it."""
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
        plan, batch, origin = reading
        with nullcontext() if self._stream is None else self._stream:
            batch = to_device(batch, self._device, non_blocking=self._non_blocking)
        done = None if self._stream is None else self._stream.record_event()
        return _Copied((plan, batch, origin), done)

    def _arrived(self, copied: _Copied) -> Reading:
        """Make the loop's stream wait for the copy, and keep the memory until that stream has finished with it."""
        if copied.done is not None:
            # The batch was allocated on the side stream; without record_stream the allocator could reuse its memory
            # while kernels on the loop's stream still read it.
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(copied.done)
            _keep_for(stream, copied.reading[1])
        return copied.reading


def _new_stream(device: torch.device) -> Any:
    """Return a stream for copies, or None if the device has no streams."""
    if not hasattr(getattr(torch, device.type, None), "Stream"):
        return None
    return torch.Stream(device)


def _keep_for(stream: Any, batch: Nested) -> None:
    def keep(leaf: Any) -> Any:
        if hasattr(leaf, "record_stream"):
            leaf.record_stream(stream)
        return leaf

    map_leaves(batch, keep)
