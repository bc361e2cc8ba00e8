"""Transfer weights to the device that computes, in a background thread and on a side stream."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_dispatch.model.tensor_subclass import made_of, parts_of

_CHUNK_BYTES = 16 << 20  # of pinned memory: enough for the link's full rate
_SMALL_BYTES = 64 << 10
_NUM_CHUNKS = 3  # one is filled, one is in transfer, one waits


class Parcel(NamedTuple):
    """A request to transfer one tensor.

    Attributes:
        home: The stored tensor.
        parts: The tensors of its values, in memory, pinned memory or the pages of a file; several if it is packed.
        device: The device that computes with it.
        dtype: The dtype that it is computed in.
        quick: Whether a transfer takes this thread less time than a request to another one.
        by_host: Whether the host computes with it.
        size_bytes: The bytes of the stored tensor.
        room_bytes: The bytes that it takes on `device`, including those for a conversion there.
    """

    home: Tensor
    parts: tuple[Tensor, ...]
    device: torch.device
    dtype: torch.dtype
    quick: bool
    by_host: bool
    size_bytes: int
    room_bytes: int

    @classmethod
    def of(cls, home: Tensor, device: torch.device, dtype: torch.dtype) -> "Parcel":
        """Return the parcel of a stored tensor.

        One that needs the pinned chunks is never quick, as these belong to the background thread.
        """
        parts = tuple(parts_of(home))
        size_bytes = sum(part.nbytes for part in parts)
        by_host = device.type == "cpu"
        direct = all(part.is_pinned() or part.device.type != "cpu" for part in parts)
        quick = (by_host and size_bytes <= _SMALL_BYTES) or direct
        room_bytes = size_bytes
        if parts[0] is home and home.dtype != dtype:
            room_bytes = home.numel() * dtype.itemsize
            if home.device != device and not by_host:
                room_bytes += size_bytes  # it is converted after the transfer
        return cls(home, parts, device, dtype, quick, by_host, size_bytes, room_bytes)

    def made(self, bring: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
        """Return the tensor made of its transferred parts; those of a packed tensor keep their dtypes."""
        if self.parts[0] is self.home:
            return bring(self.home, self.dtype)
        return made_of(self.home, [bring(part, part.dtype) for part in self.parts])


# Tensors; the event after their copies on the side stream; and when the copies began and were enqueued.
_Brought = tuple[list[Tensor], torch.Event | None, tuple[float, float]]


class PendingTransfer:
    """The tensors of one transfer.

    Args:
        brought: The result of a transfer that was made at once.
        work: The transfer in the background thread, if any.
    """

    __slots__ = ("_brought", "_waited", "_work")

    def __init__(self, brought: _Brought | None = None, work: Future[_Brought] | None = None) -> None:
        self._brought = brought
        self._work = work
        self._waited: set[int] | None = None  # ids of the streams that wait for the copies

    def __del__(self) -> None:
        """Cancel a transfer that nothing waits for any more, unless it has begun."""
        if self._work is not None:
            self._work.cancel()

    @property
    def used(self) -> bool:
        """True if anything has waited for the transfer."""
        return self._waited is not None

    def given_up(self) -> "GivenUp":
        """Return the completion of copies that nothing uses, without a reference to their memory."""
        if self._work is None or self._brought is not None:
            return GivenUp(None if self._brought is None else self._brought[1])
        given_up = GivenUp(None, begun=True)
        self._work.cancel()
        self._work.add_done_callback(given_up.note)
        return given_up

    def wait(self) -> list[Tensor]:
        """Return the tensors, ready for this thread's next computation on their device.

        Raises:
            Exception: The error of the transfer, such as no memory on the device.
        """
        try:
            tensors, event, _ = self._brought or self._result()
        except BaseException:
            del self  # the error's traceback holds this frame: a reference cycle, which would keep the model
            raise
        if event is not None:
            self._order(tensors, event)
        return tensors

    def times(self) -> tuple[float, float]:
        """Return when the transfer began and ended, after waiting for it."""
        return (self._brought or self._result())[2]

    def _result(self) -> _Brought:
        assert self._work is not None
        try:
            self._brought = self._work.result()
        except BaseException:
            del self
            raise
        return self._brought

    def _order(self, tensors: Sequence[Tensor], event: torch.Event) -> None:
        """Make this thread's stream wait for the copies, once."""
        stream = torch.accelerator.current_stream(tensors[0].device)
        if self._waited is None:
            self._waited = set()
        if stream.stream_id not in self._waited:
            self._waited.add(stream.stream_id)
            stream.wait_event(event)
            for tensor in (part for whole in tensors for part in parts_of(whole)):
                # The memory is from the side stream's pool, and must not be reused before this stream is done.
                tensor.record_stream(stream)


class GivenUp:
    """The completion of a copy that nothing waits for.

    Args:
        event: The event after the copy; None for none.
        begun: Whether the thread may still be making the copy.
    """

    def __init__(self, event: torch.Event | None, *, begun: bool = False) -> None:
        self._event = event
        self._asked = threading.Event()
        if not begun:
            self._asked.set()

    def note(self, work: Future[_Brought]) -> None:
        """Note that the thread is done, and take the event of its copy."""
        if not work.cancelled() and work.exception() is None:
            self._event = work.result()[1]
        self._asked.set()

    def query(self) -> bool:
        """Return whether the copy is over."""
        return self._asked.is_set() and (self._event is None or self._event.query())

    def synchronize(self) -> None:
        """Wait until the copy is over."""
        self._asked.wait()
        if self._event is not None:
            self._event.synchronize()


class Carrier:
    """The background thread and side streams that transfer tensors, in the order of the requests."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = _new_thread()
        self._process = os.getpid()
        self._streams: dict[torch.device, torch.Stream] = {}
        self._chunks: _Chunks | None = None
        # Parameters cannot be made of inference tensors. Callers hold the lock, so one context does for all threads.
        self._ordinary = torch.inference_mode(mode=False)

    def bring(self, parcels: Sequence[Parcel]) -> PendingTransfer:
        """Begin to transfer tensors; a transfer that takes less time than a request to the thread is made at once."""
        for parcel in parcels:
            if not parcel.quick and self._thread is not None:
                return PendingTransfer(work=self._own_thread().submit(self._bring, parcels))
        if torch.is_inference_mode_enabled():
            with self._ordinary:
                return PendingTransfer(self._bring(parcels))
        return PendingTransfer(self._bring(parcels))

    def close(self) -> None:
        """End the thread; later requests, of a backward for example, are served at once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _own_thread(self) -> ThreadPoolExecutor:
        if self._thread is None or self._process != os.getpid():  # a fork lacks its parent's threads
            self._process, self._thread = os.getpid(), _new_thread()
        return self._thread

    def _bring(self, parcels: Sequence[Parcel]) -> _Brought:
        begin = perf_counter()
        event = None
        if parcels[0].by_host:
            tensors = [parcel.made(_copied_here) for parcel in parcels]
        else:
            tensors, event = self._copy(parcels)
        return tensors, event, (begin, perf_counter())

    def _copy(self, parcels: Sequence[Parcel]) -> tuple[list[Tensor], torch.Event]:
        device = parcels[0].device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        event = torch.Event(device)
        if any(parcel.home.device.type != "cpu" for parcel in parcels):
            # The device may still be writing to a stored tensor. Its parcel is quick: this is the caller's thread.
            stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            tensors = [parcel.made(partial(self._copied, device, stream)) for parcel in parcels]
            event.record(stream)
        return tensors, event

    def _copied(self, device: torch.device, stream: torch.Stream, home: Tensor, dtype: torch.dtype) -> Tensor:
        if home.is_pinned() or home.device.type != "cpu" or not home.is_contiguous():
            return home.to(device, non_blocking=True).to(dtype)
        self._chunks = self._chunks or _Chunks()
        return self._chunks.copied(home, device, stream).to(dtype)


def _copied_here(home: Tensor, dtype: torch.dtype) -> Tensor:
    # A clone takes half the time of a conversion to the same dtype.
    return home.clone() if home.dtype is dtype else home.to(dtype)


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="drivetrain-offload")


class _Chunks:
    """A ring of pinned chunks, through which tensors that are not pinned are copied."""

    def __init__(self) -> None:
        self._chunks = [
            torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_CHUNKS)
        ]
        self._events: list[torch.Event | None] = [None] * _NUM_CHUNKS
        self._next = 0

    def copied(self, home: Tensor, device: torch.device, stream: torch.Stream) -> Tensor:
        """Return a copy of a contiguous tensor on a device; its last chunks may still be in transfer."""
        arrived = torch.empty_like(home, device=device)
        source = home.view(-1).view(torch.uint8)
        target = arrived.view(-1).view(torch.uint8)
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
        return arrived
