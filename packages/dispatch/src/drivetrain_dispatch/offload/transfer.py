"""Transfer weights to the device that computes, in a background thread and on a side stream."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from drivetrain_dispatch.device_copies import copies_aside
from drivetrain_dispatch.model.quantized_tensor import made_of, parts_of

_CHUNK_BYTES = 16 << 20  # of pinned memory: enough for the link's full rate
_SMALL_BYTES = 64 << 10
_THREAD = "drivetrain-offload"  # the prefix of its name
_NUM_CHUNKS = 3  # one is filled, one is in transfer, one waits


class TransferRequest(NamedTuple):
    """A request to transfer one tensor."""

    stored: Tensor
    # The tensors of its values, in memory, pinned memory or the pages of a file; several if it is packed.
    parts: tuple[Tensor, ...]
    device: torch.device
    dtype: torch.dtype
    quick: bool  # whether a transfer takes this thread less time than a request to another one
    size_bytes: int
    device_bytes: int  # the bytes that it takes on `device`, including those for a conversion there

    @classmethod
    def of(cls, stored: Tensor, device: torch.device, dtype: torch.dtype) -> "TransferRequest":
        """Return the request for a stored tensor."""
        parts = tuple(parts_of(stored))
        size_bytes = sum(part.nbytes for part in parts)
        by_host = not copies_aside(device.type)
        direct = all(part.is_pinned() or part.device.type != "cpu" for part in parts)
        # The pinned chunks belong to the background thread.
        quick = (by_host and size_bytes <= _SMALL_BYTES) or direct
        device_bytes = size_bytes
        if parts[0] is stored and stored.dtype != dtype:
            device_bytes = stored.numel() * dtype.itemsize
            if stored.device != device and device.type != "cpu":
                device_bytes += size_bytes  # it is converted after the transfer
        return cls(stored, parts, device, dtype, quick, size_bytes, device_bytes)

    def copied(self, copy: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
        """Return the tensor made of copies of its parts. The parts of a packed tensor keep their dtypes."""
        if self.parts[0] is self.stored:
            return copy(self.stored, self.dtype)
        return made_of(self.stored, [copy(part, part.dtype) for part in self.parts])


class Copies(NamedTuple):
    """The copies that a transfer has made."""

    tensors: list[Tensor]
    event: torch.Event | None  # the event after the copies on the side stream; None for copies of the host
    span: tuple[float, float]  # when the copies began and were enqueued, in seconds


class PendingTransfer:
    """The tensors of one transfer."""

    __slots__ = ("_copies", "_waiting_streams", "_work")

    def __init__(self, copies: Copies | None = None, work: Future[Copies] | None = None) -> None:
        self._copies = copies
        self._work = work
        self._waiting_streams: set[int] | None = None  # ids of the streams that wait for the copies

    def __del__(self) -> None:
        """Cancel the transfer if it has not begun, as nothing waits for it."""
        if self._work is not None:
            self._work.cancel()

    @property
    def is_over(self) -> bool:
        """True if a stream has waited for the copies, or the host has made them."""
        copies = self._copies
        return self._waiting_streams is not None or (copies is not None and copies.event is None)

    def completion(self) -> "TransferCompletion":
        """Return the completion of the copies, without a reference to their memory."""
        if self._work is None or self._copies is not None:
            return TransferCompletion(None if self._copies is None else self._copies.event)
        completion = TransferCompletion(None, may_be_running=True)
        self._work.add_done_callback(completion.finish)
        return completion

    def wait(self) -> list[Tensor]:
        """Return the tensors, ready for this thread's next computation, or raise the transfer's error."""
        try:
            tensors, event, _ = self._copies or self._result()
        except BaseException:
            del self  # the error's traceback holds this frame: a reference cycle, which would keep the model
            raise
        if event is None:
            return tensors
        # This thread's stream waits for the copies, once.
        stream = torch.accelerator.current_stream(tensors[0].device)
        if self._waiting_streams is None:
            self._waiting_streams = set()
        if stream.stream_id not in self._waiting_streams:
            self._waiting_streams.add(stream.stream_id)
            stream.wait_event(event)
            for tensor in (part for whole in tensors for part in parts_of(whole)):
                # The memory is from the side stream's pool, and must not be reused before this stream is done.
                tensor.record_stream(stream)
        return tensors

    def span(self) -> tuple[float, float]:
        """Return when the transfer began and ended, after waiting for it."""
        return (self._copies or self._result()).span

    def _result(self) -> Copies:
        assert self._work is not None
        try:
            self._copies = self._work.result()
        except BaseException:
            del self
            raise
        return self._copies


class TransferCompletion:
    """The completion of copies that nothing waits for and that the background thread may still be making."""

    def __init__(self, event: torch.Event | None, *, may_be_running: bool = False) -> None:
        self._event = event
        self._enqueued = threading.Event()
        if not may_be_running:
            self._enqueued.set()

    def finish(self, work: Future[Copies]) -> None:
        """Record that the thread is done, and take the event of its copies."""
        if not work.cancelled() and work.exception() is None:
            self._event = work.result().event
        self._enqueued.set()

    def query(self) -> bool:
        """Return whether the copies are over."""
        return self._enqueued.is_set() and (self._event is None or self._event.query())

    def synchronize(self) -> None:
        """Wait until the copies are over."""
        self._enqueued.wait()
        if self._event is not None:
            self._event.synchronize()


class TransferEngine:
    """The background thread and side streams that transfer tensors, in the order of the requests."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, _THREAD)
        self._process = os.getpid()
        self._streams: dict[torch.device, torch.Stream] = {}
        self._chunks: _PinnedChunks | None = None
        # Parameters cannot be made of inference tensors. Callers hold the lock, so one context does for all threads.
        self._no_inference_mode = torch.inference_mode(mode=False)

    def start(self, requests: Sequence[TransferRequest]) -> PendingTransfer:
        """Start to transfer tensors; a transfer shorter than a request to the thread runs in the caller at once."""
        for request in requests:
            if not request.quick and self._thread is not None:
                if self._process != os.getpid():  # a fork lacks its parent's threads
                    self._process, self._thread = os.getpid(), ThreadPoolExecutor(1, _THREAD)
                return PendingTransfer(work=self._thread.submit(self._transfer, requests))
        if torch.is_inference_mode_enabled():
            with self._no_inference_mode:
                return PendingTransfer(self._transfer(requests))
        return PendingTransfer(self._transfer(requests))

    def close(self) -> None:
        """End the thread. Later requests, of a backward for example, run in the caller."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _transfer(self, requests: Sequence[TransferRequest]) -> Copies:
        begin = perf_counter()
        device = requests[0].device
        if not copies_aside(device.type):
            tensors = [request.copied(partial(_copied_in_order, device)) for request in requests]
            return Copies(tensors, None, (begin, perf_counter()))
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        event = torch.Event(device)
        if any(request.stored.device.type != "cpu" for request in requests):
            # The device may still be writing to a stored tensor. Its request is quick: this is the caller's thread.
            stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            tensors = [request.copied(partial(self._copy, device, stream)) for request in requests]
            event.record(stream)
        return Copies(tensors, event, (begin, perf_counter()))

    def _copy(self, device: torch.device, stream: torch.Stream, stored: Tensor, dtype: torch.dtype) -> Tensor:
        if stored.is_pinned() or stored.device.type != "cpu" or not stored.is_contiguous():
            return stored.to(device, non_blocking=True).to(dtype)
        self._chunks = self._chunks or _PinnedChunks()
        return self._chunks.copy(stored, device, stream).to(dtype)


def _copied_in_order(device: torch.device, stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy on a device, made before this returns, or before what is computed next."""
    # A clone takes half the time of a conversion to the same dtype.
    return stored.clone() if (stored.device, stored.dtype) == (device, dtype) else stored.to(device, dtype)


class _PinnedChunks:
    """A ring of pinned chunks, through which tensors that are not pinned are copied."""

    def __init__(self) -> None:
        chunks = torch.empty(_NUM_CHUNKS, _CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        self._chunks = chunks.unbind()
        self._events: list[torch.Event | None] = [None] * _NUM_CHUNKS
        self._next = 0

    def copy(self, stored: Tensor, device: torch.device, stream: torch.Stream) -> Tensor:
        """Return a copy of a contiguous tensor on a device; its last chunks may still be in transfer."""
        copied = torch.empty_like(stored, device=device)
        source = stored.view(-1).view(torch.uint8)
        target = copied.view(-1).view(torch.uint8)
        for start in range(0, source.numel(), _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, source.numel() - start)
            chunk, at = self._chunks[self._next][:size], self._next
            self._next = (self._next + 1) % _NUM_CHUNKS
            if (sent := self._events[at]) is not None:
                sent.synchronize()  # its last content must be on the device
            chunk.copy_(source[start : start + size])
            target[start : start + size].copy_(chunk, non_blocking=True)
            event = torch.Event(device)
            event.record(stream)
            self._events[at] = event
        return copied


# An operation that a device runs asynchronously.
Completion: TypeAlias = torch.Event | TransferCompletion


class TransferWindow:
    """The transfer window of one device. Callers hold the engine's lock."""

    def __init__(self, device: torch.device, window_bytes: int) -> None:
        self._device = device
        self._window_bytes = window_bytes
        self._reserved_bytes = 0
        # The bytes that the host has released; the device runs behind it, and may still use their memory.
        self._released: deque[tuple[Completion, int]] = deque()

    def fits(self, size_bytes: int) -> bool:
        """Return whether the window has room for this many more bytes now."""
        while self._released and self._released[0][0].query():
            self._reserved_bytes -= self._released.popleft()[1]
        return self._reserved_bytes + size_bytes <= self._window_bytes

    def wait_for(self, size_bytes: int) -> bool:
        """Wait for releases until `size_bytes` more fit or no release is pending; return whether this waited."""
        waited = False
        while not self.fits(size_bytes) and self._released:
            self._released[0][0].synchronize()
            waited = True
        return waited

    def reserve(self, size_bytes: int) -> None:
        """Add bytes to those that the device holds."""
        self._reserved_bytes += size_bytes

    def release(self, size_bytes: int, cancelled: Completion | None = None) -> None:
        """Release memory that the caller's thread used, or that no one but `cancelled` copies may still fill."""
        if not copies_aside(self._device.type):
            self._reserved_bytes -= size_bytes
            return
        if cancelled is None:
            # Recorded after the memory was freed: once it has happened, torch's allocator can reuse that memory.
            cancelled = event = torch.Event(self._device)
            event.record(torch.accelerator.current_stream(self._device))
        self._released.append((cancelled, size_bytes))
