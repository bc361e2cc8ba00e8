"""Who brings weights to the device that computes: a thread beside the forward, on a stream beside its stream."""

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

_CHUNK_BYTES = 16 << 20  # of pinned memory: large enough for the link's full rate
_SMALL_BYTES = 64 << 10
_NUM_CHUNKS = 3  # one is being filled, one is on its way, one may wait


class Parcel(NamedTuple):
    """A tensor that is to be brought.

    Attributes:
        home: The tensor that is stored.
        parts: Its values, on the host: memory, pinned memory or the pages of a file; several of one that is packed.
        device: Where it is computed.
        dtype: As what.
        quick: Whether to bring it takes this thread less time than to ask another one.
        by_host: Whether the host computes it.
        size_bytes: Of what is stored.
        room_bytes: What it takes where it is computed, also while it is converted there.
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
        """With what is known of its size and memory. What goes through the pinned pieces is one thread's."""
        parts = tuple(parts_of(home))
        size_bytes = sum(part.nbytes for part in parts)
        by_host = device.type == "cpu"
        direct = all(part.is_pinned() or part.device.type != "cpu" for part in parts)
        quick = (by_host and size_bytes <= _SMALL_BYTES) or direct
        room_bytes = size_bytes
        if parts[0] is home and home.dtype != dtype:
            room_bytes = home.numel() * dtype.itemsize
            if home.device != device and not by_host:
                room_bytes += size_bytes  # it is converted once it is there
        return cls(home, parts, device, dtype, quick, by_host, size_bytes, room_bytes)

    def made(self, bring: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
        """The tensor, of what each of its parts becomes; parts of one that is packed keep their dtypes."""
        if self.parts[0] is self.home:
            return bring(self.home, self.dtype)
        return made_of(self.home, [bring(part, part.dtype) for part in self.parts])


# Tensors; the event behind their copies on the stream that copies; and when that was begun and asked for.
_Brought = tuple[list[Tensor], torch.Event | None, tuple[float, float]]


class Arrival:
    """Tensors on their way.

    Args:
        brought: What was brought at once.
        work: What a thread does, else.
    """

    __slots__ = ("_brought", "_waited", "_work")

    def __init__(self, brought: _Brought | None = None, work: Future[_Brought] | None = None) -> None:
        self._brought = brought
        self._work = work
        self._waited: set[int] | None = None  # streams that the copies come before

    def __del__(self) -> None:
        """Not bring what nobody waits for any more, unless that has begun."""
        if self._work is not None:
            self._work.cancel()

    @property
    def used(self) -> bool:
        """Whether anybody has waited for it."""
        return self._waited is not None

    def given_up(self) -> "GivenUp":
        """What tells when the device is through with copying it, though nobody uses it; it holds no memory."""
        if self._work is None or self._brought is not None:
            return GivenUp(None if self._brought is None else self._brought[1])
        given_up = GivenUp(None, begun=True)
        self._work.cancel()
        self._work.add_done_callback(given_up.note)
        return given_up

    def wait(self) -> list[Tensor]:
        """The tensors, ready for what this thread computes next on their device.

        Raises:
            Exception: Whatever kept the thread from bringing them, such as no memory on the device.
        """
        try:
            tensors, event, _ = self._brought or self._result()
        except BaseException:
            del self  # an error knows the frames that it came through: it would hold itself, and the model
            raise
        if event is not None:
            self._order(tensors, event)
        return tensors

    def times(self) -> tuple[float, float]:
        """When it was begun and ended; waits for it."""
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
        """Have this thread's stream wait for the copies, once."""
        stream = torch.accelerator.current_stream(tensors[0].device)
        if self._waited is None:
            self._waited = set()
        if stream.stream_id not in self._waited:
            self._waited.add(stream.stream_id)
            stream.wait_event(event)
            for tensor in (part for whole in tensors for part in parts_of(whole)):
                # The memory came from another stream's pool: it is free again when this stream is through with it.
                tensor.record_stream(stream)


class GivenUp:
    """Tells when a copy that nobody waits for is over.

    Args:
        event: Behind the copy; None for none.
        begun: Whether a thread may be at it still.
    """

    def __init__(self, event: torch.Event | None, *, begun: bool = False) -> None:
        self._event = event
        self._asked = threading.Event()
        if not begun:
            self._asked.set()

    def note(self, work: Future[_Brought]) -> None:
        """The thread is through with it."""
        if not work.cancelled() and work.exception() is None:
            self._event = work.result()[1]
        self._asked.set()

    def query(self) -> bool:
        """Whether it is over."""
        return self._asked.is_set() and (self._event is None or self._event.query())

    def synchronize(self) -> None:
        """Wait until it is."""
        self._asked.wait()
        if self._event is not None:
            self._event.synchronize()


class Carrier:
    """Brings tensors in the order in which they were asked for."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = _new_thread()
        self._process = os.getpid()
        self._streams: dict[torch.device, torch.Stream] = {}
        self._chunks: _Chunks | None = None
        # Parameters are made of ordinary tensors. Entered by one at a time: who calls holds a lock.
        self._ordinary = torch.inference_mode(mode=False)

    def bring(self, parcels: Sequence[Parcel]) -> Arrival:
        """Begin to bring tensors; what takes less time than to ask a thread for it is done at once."""
        for parcel in parcels:
            if not parcel.quick and self._thread is not None:
                return Arrival(work=self._own_thread().submit(self._bring, parcels))
        if torch.is_inference_mode_enabled():
            with self._ordinary:
                return Arrival(self._bring(parcels))
        return Arrival(self._bring(parcels))

    def close(self) -> None:
        """End the thread; what is still asked for, by a backward for example, is brought at once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _own_thread(self) -> ThreadPoolExecutor:
        if self._thread is None or self._process != os.getpid():  # a fork has no threads of its parent's
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
            # What is stored on a device may just be written there; such parcels are this thread's own.
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
    """A few pieces of pinned memory through which everything goes that is not pinned itself."""

    def __init__(self) -> None:
        self._chunks = [
            torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_CHUNKS)
        ]
        self._events: list[torch.Event | None] = [None] * _NUM_CHUNKS
        self._next = 0

    def copied(self, home: Tensor, device: torch.device, stream: torch.Stream) -> Tensor:
        """A copy of a contiguous tensor on a device; the last pieces may be on their way still."""
        arrived = torch.empty_like(home, device=device)
        source = home.view(-1).view(torch.uint8)
        target = arrived.view(-1).view(torch.uint8)
        for start in range(0, source.numel(), _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, source.numel() - start)
            chunk, at = self._chunks[self._next][:size], self._next
            self._next = (self._next + 1) % _NUM_CHUNKS
            if (sent := self._events[at]) is not None:
                sent.synchronize()  # what it held is on the device
            chunk.copy_(source[start : start + size])
            target[start : start + size].copy_(chunk, non_blocking=True)
            event = torch.Event(device)
            event.record(stream)
            self._events[at] = event
        return arrived
