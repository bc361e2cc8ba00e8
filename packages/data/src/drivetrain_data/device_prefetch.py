"""Prefetch batches to the device, on a side stream where the device has streams.

Copies from pinned memory then overlap with computation: the loop's stream waits only for the copy that it needs. The
loader's position advances when the loop receives a batch, not when its copy starts.
"""

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from drivetrain_data._nested import leaves_of, to_device
from drivetrain_data.compat import is_profiled
from drivetrain_data.sources.batch_source import Reading
from drivetrain_data.sources.torch_loader import IN_ORDER


class DeviceCopies:
    """A prefetcher that copies batches to a device, up to `num_ahead` batches before the loop asks for them."""

    def __init__(self, device: torch.device, *, non_blocking: bool, num_ahead: int) -> None:
        self._device = device
        self._non_blocking = non_blocking
        self._num_ahead = num_ahead
        has_streams = device.type not in IN_ORDER and hasattr(getattr(torch, device.type, None), "Stream")
        self._stream = torch.Stream(device) if num_ahead and has_streams else None

    def copied(self, readings: Iterator[Reading]) -> Generator[Reading]:
        """Yield the readings with their batches on the device; raise an error only after the batches before it."""
        # With the event recorded after each copy; None if the loop's own stream makes the copies.
        ahead: deque[tuple[Reading, Any]] = deque()
        while True:
            try:
                reading = next(readings, None)
            except Exception:
                while ahead:
                    yield self._receive(*ahead.popleft())
                raise
            if reading is None:
                break
            plan, batch, origin = reading
            named = record_function("drivetrain: copy a batch") if is_profiled() else nullcontext()
            with named, self._stream or nullcontext():
                batch = to_device(batch, self._device, non_blocking=self._non_blocking)
            done = None if self._stream is None else self._stream.record_event()
            ahead.append(((plan, batch, origin), done))
            if len(ahead) > self._num_ahead:
                yield self._receive(*ahead.popleft())
        while ahead:
            yield self._receive(*ahead.popleft())

    def _receive(self, reading: Reading, done: Any) -> Reading:
        """Make the loop's stream wait for the copy, and keep the copy's memory until the stream no longer uses it."""
        if done is not None:
            # The batch was allocated on the side stream; without record_stream the allocator could reuse its memory
            # while kernels on the loop's stream still read it.
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(done)
            for leaf in leaves_of(reading[1]):
                if hasattr(leaf, "record_stream"):
                    leaf.record_stream(stream)
        return reading
