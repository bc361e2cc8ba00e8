"""Overlap transfers with computation: fetch each unit of a model before its turn, and release it after."""

import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from weakref import finalize

import torch
from torch import Tensor

from drivetrain_dispatch.compat import call_after_backward
from drivetrain_dispatch.offload.execution_order import BackwardOrder, ExecutionOrder, OrderRecorder
from drivetrain_dispatch.offload.parameter import make_ordinary, mark_offloaded
from drivetrain_dispatch.offload.residency import OffloadedTensor, Residency
from drivetrain_dispatch.offload.saved_tensors import save_references
from drivetrain_dispatch.offload.trace import OffloadTrace, UnitUse
from drivetrain_weights import MappedFile


class OffloadEngine:
    """The engine that fetches the units of a model for forwards and backwards in any number of threads.

    Weights on a device or in transfer to it stay within the device's window; a unit in use is fetched even if it is
    larger. Between forwards nothing is retained or in transfer, since stored weights may change then; the next
    forward ends a backward that failed. Only the engine has a lock. The engine holds the lock when it calls the
    residency, a prefetcher or the backward's order, and while it waits for a transfer.
    """

    def __init__(
        self,
        units: Sequence[Sequence[OffloadedTensor]],
        residency: Residency,
        *,
        names: Sequence[str],
        files: Collection[MappedFile] = (),
    ) -> None:
        self.trace: OffloadTrace | None = None
        self._names = names
        self._units = units
        self._files = files
        self._lock = threading.RLock()
        self._residency = residency
        self.stats = residency.stats
        # The order of each method that computes with the model, by its name.
        self._orders = defaultdict[str, ExecutionOrder](partial(ExecutionOrder, range(len(units))))
        self._threads = _Threads(units, residency)
        self._forwards: list[_ThreadState] = []  # of each forward that is running, the nested ones too
        self._backward = BackwardOrder()
        self._backward_prefetcher = Prefetcher(units, residency)
        self._backward_unit: int | None = None  # the unit that the backward uses, whose claim it holds
        self._unit_of: dict[OffloadedTensor, int] = {}  # the first unit of each tensor
        for index, tensors in enumerate(units):
            for tensor in tensors:
                self._unit_of.setdefault(tensor, index)
        self._offloaded = {id(tensor.tensor): tensor for tensor in self._unit_of}
        marked = [tensor for tensor in self._unit_of if not tensor.quantized]
        for tensor in marked:
            mark_offloaded(tensor.tensor, self)
        # Also for tensors that outlive their model.
        self._unmark = finalize(self, _unmark, marked)
        self._unmark.atexit = False  # torch may be torn down by then, and nothing uses the tensors any more

    def begin(self, method: str) -> None:
        """Begin a use of the whole model, by its forward or another method; its files must be unchanged."""
        for file in self._files:
            file.check_unchanged()
        thread = self._threads.state
        thread.hooks.append(ExitStack())
        with self._lock:
            thread.recorder.begin(self._orders[method])
            self._forwards.append(thread)
            self._end_backward()
            self._backward.forward = thread.recorder.order
        try:
            if torch.is_grad_enabled():
                thread.hooks[-1].enter_context(save_references(self.find_in_use, self.fetch_for_backward))
            with self._lock:
                thread.request_next()
        except BaseException:
            self.end(completed=False)
            raise

    def end(self, *, completed: bool) -> None:
        """End a use of the whole model; `completed` is True if nothing failed."""
        thread = self._threads.state
        thread.hooks.pop().close()
        with self._lock:
            thread.recorder.end(completed=completed)
            self._forwards.remove(thread)
            self._release_views(thread)
            if thread.recorder.depth == 0:
                thread.prefetcher.cancel_all()

    def enter(self, index: int) -> None:
        """Acquire a unit for its use, and request the units that follow before waiting for it."""
        thread, trace = self._threads.state, self.trace
        start = perf_counter() if trace is not None else 0.0
        tensors = self._units[index]
        with self._lock:
            recomputed = not thread.recorder.depth and self._join_or_end_backward()
            if recomputed and any(each.is_stale for each in tensors):
                # An optimizer has stepped within the backward.
                self._backward_prefetcher.cancel_from(index)
                if self._backward_unit == index:
                    self._cancel_backward_unit()
            if not thread.take(index):
                self._request_for_use(tensors)
            try:
                if recomputed:
                    self._use_in_backward(index, recomputed=True)
                else:
                    thread.request_next()
            except BaseException:
                self._residency.cancel(tensors)
                raise
            self._residency.acquire(tensors)
            self.stats.num_used += 1
            thread.num_units += 1
        if trace is not None:
            thread.waits.append((start, perf_counter()))

    def leave(self, index: int) -> None:
        """Release a unit after its use, unless it is expected again."""
        thread, trace = self._threads.state, self.trace
        if trace is not None and thread.waits:
            waited, transfer = thread.waits.pop(), self._units[index][0].transfer
            fetched = waited if transfer is None else transfer.span()
            trace.uses.append(UnitUse(self._names[index], fetched, waited, (waited[1], perf_counter())))
        with self._lock:
            thread.num_units -= 1
            self._residency.release(self._units[index])
            if thread.viewed:
                self._release_views(thread)
            thread.request_next()

    def is_computing(self) -> bool:
        """Return whether this thread computes with the model."""
        return self._threads.state.is_computing()

    def acquire(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the fetched tensors to compute with in place of offloaded ones."""
        offloaded = [self._offloaded[id(tensor)] for tensor in tensors]
        with self._lock:
            self._request_for_use(offloaded)
            self._residency.acquire(offloaded)
            self.stats.num_used += 1
            return [tensor.shown for tensor in offloaded if tensor.shown is not None]

    def release(self, tensors: Sequence[Tensor], result: object) -> None:
        """Release tensors after an operation."""
        offloaded = [self._offloaded[id(tensor)] for tensor in tensors]
        with self._lock:
            viewed = self._residency.find_in_use(result) if isinstance(result, Tensor) else None
            if viewed is not None and viewed in offloaded:
                # Until the forward ends, the view may still be written to.
                offloaded.remove(viewed)
                self._threads.state.viewed.append(viewed)
            self._residency.release(offloaded)

    def keeps_device(self, tensor: Tensor) -> bool:
        """Return whether the device that stores a tensor also computes with it; its dtype may still differ."""
        request = self._offloaded[id(tensor)].request
        return request.device == request.stored.device

    def find_in_use(self, tensor: Tensor) -> OffloadedTensor | None:
        """Return the offloaded tensor in use that a tensor is a view of; None if it is no such view."""
        with self._lock:
            return self._residency.find_in_use(tensor)

    def fetch_for_backward(self, weight: OffloadedTensor) -> Tensor:
        """Return the values of a weight, which stay until the backward uses another unit."""
        with self._lock:
            if not self._backward.is_running:
                self._await_backward_end()
            self._use_in_backward(self._unit_of[weight], recomputed=False)
            return self._residency.values(weight)

    def is_busy(self) -> bool:
        """Return whether any thread computes with the model."""
        return bool(self._forwards) or bool(self._residency.in_use)

    def close(self) -> None:
        """Make every tensor an ordinary one again, with the stored values."""
        with self._lock:
            self._end_backward()
            self._residency.close()
            self._unmark()

    def _request_for_use(self, tensors: Sequence[OffloadedTensor]) -> None:
        """Request tensors for immediate use, and count a miss if no transfer of them had begun."""
        waited = self._free_window(tensors)
        if self._residency.request(tensors) and not waited:
            self.stats.num_missed += 1

    def _free_window(self, tensors: Sequence[OffloadedTensor]) -> bool:
        """Cancel prefetched units, last ones first, and wait for room; return whether the caller had to wait."""
        if self._residency.fits(tensors):
            return False
        for thread in self._forwards:
            thread.prefetcher.cancel_until_fits(tensors)
        self._backward_prefetcher.cancel_until_fits(tensors)
        return self._residency.wait_for_room(tensors)

    def _use_in_backward(self, unit: int, *, recomputed: bool) -> None:
        """Claim the unit that a backward uses, drop the claim on the previous unit, and request the next units."""
        if unit == self._backward_unit:
            return  # autograd asks for each weight of a unit by itself
        order, position = self._backward.use(unit, recomputed=recomputed)
        requested, tensors = self._backward_prefetcher.take(unit, order, position), self._units[unit]
        if not requested and not self._residency.fits(tensors):
            self._cancel_backward_unit()
        try:
            if not requested:
                self._free_window(tensors)
                self._residency.request(tensors)
        finally:
            self._cancel_backward_unit()  # after the claim, as tensors may be in both units
        self._backward_unit = unit
        self._backward_prefetcher.request(order, position)

    def _cancel_backward_unit(self) -> None:
        unit, self._backward_unit = self._backward_unit, None
        if unit is not None:
            self._residency.cancel(self._units[unit])

    def _join_or_end_backward(self) -> bool:
        """Await the end of this thread's backward, and return True; outside a backward, end the last one."""
        try:
            self._await_backward_end()
        except RuntimeError:  # torch accepts callbacks only in a backward
            self._end_backward()
            return False
        return True

    def _await_backward_end(self) -> None:
        """Have torch call `_end_backward` after this backward, as DistributedDataParallel does."""
        call_after_backward(partial(self._end_backward, completed=True))

    def _end_backward(self, *, completed: bool = False) -> None:
        """End the backward and give up its claims, as an optimizer may change the weights now."""
        with self._lock:
            self._backward.end(completed=completed)
            self._cancel_backward_unit()
            self._backward_prefetcher.cancel_all()

    def _release_views(self, thread: "_ThreadState") -> None:
        """Release viewed weights if a thread is in no forward, as nothing writes to the views then."""
        if thread.viewed and not thread.is_computing():
            viewed, thread.viewed = thread.viewed, []
            self._residency.release(viewed)


class Prefetcher:
    """The units that a run has requested and not used yet. Callers hold the engine's lock."""

    __slots__ = ("_out_of_order", "_requested", "_residency", "_units")

    def __init__(self, units: Sequence[Sequence[OffloadedTensor]], residency: Residency) -> None:
        self._units = units
        self._residency = residency
        self._requested: deque[int] = deque()  # the next ones in the order, without a gap
        self._out_of_order: list[int] = []  # requested too, before an unexpected unit came in between

    def take(self, unit: int, order: Sequence[int], position: int) -> bool:
        """Take a unit for its use, and return whether it was requested; its claim then passes to the caller."""
        requested = self._requested
        if requested and requested[0] == unit:
            requested.popleft()
            return True
        if not requested:
            return False
        if found := unit in requested:
            requested.remove(unit)
        # Requested units that are not near the next position of the order are cancelled.
        near = list(order[position : position + len(requested) + 1])
        for other in requested:
            if other in near:
                near.remove(other)
                self._out_of_order.append(other)
            else:
                self._residency.cancel(self._units[other])
        requested.clear()
        return found

    def request(self, order: Sequence[int], position: int) -> None:
        """Request the units of an order from `position` on, as long as there is room."""
        requested, out_of_order = self._requested, self._out_of_order
        next_position = position + len(requested)
        while next_position < len(order):
            unit = order[next_position]
            if out_of_order and unit in out_of_order:
                out_of_order.remove(unit)
            elif self._residency.fits(self._units[unit]):
                self._residency.request(self._units[unit])
            else:
                break
            requested.append(unit)
            next_position += 1
        while out_of_order:
            self._residency.cancel(self._units[out_of_order.pop()])

    def cancel_until_fits(self, tensors: Sequence[OffloadedTensor]) -> None:
        """Cancel requested units, the last ones first, until there is room for `tensors` or no unit is left."""
        while (self._requested or self._out_of_order) and not self._residency.fits(tensors):
            self._cancel_last()

    def cancel_from(self, unit: int) -> None:
        """Cancel a requested unit, and all units after it."""
        while unit in self._requested:
            self._residency.cancel(self._units[self._requested.pop()])

    def cancel_all(self) -> None:
        """Cancel all requested units."""
        while self._requested or self._out_of_order:
            self._cancel_last()

    def _cancel_last(self) -> None:
        last = self._out_of_order.pop() if self._out_of_order else self._requested.pop()
        self._residency.cancel(self._units[last])


class _ThreadState:
    """The state of one thread: its current forward, its prefetched units, and the weights in use."""

    __slots__ = ("hooks", "num_units", "prefetcher", "recorder", "viewed", "waits")

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.recorder = OrderRecorder()
        self.prefetcher = prefetcher
        self.num_units = 0
        self.hooks: list[ExitStack] = []  # the saved-tensor hooks of each nested forward
        self.viewed: list[OffloadedTensor] = []  # the tensors that the forward has views of
        self.waits: list[tuple[float, float]] = []  # when each unit that the thread is in was waited for

    def is_computing(self) -> bool:
        """Return whether the thread computes with the model."""
        return self.num_units > 0 or self.recorder.depth > 0

    def take(self, unit: int) -> bool:
        """Take a unit for its use; return whether the thread's current forward had requested it."""
        recorder = self.recorder
        if not recorder.depth:
            return False
        recorder.use(unit)
        return self.prefetcher.take(unit, recorder.order.units, recorder.position)

    def request_next(self) -> None:
        """Request the units that the thread's current forward uses next."""
        if self.recorder.depth:
            self.prefetcher.request(self.recorder.order.units, self.recorder.position)


class _Threads(threading.local):
    """The state of the current thread; looked up once at each use of a unit."""

    def __init__(self, units: Sequence[Sequence[OffloadedTensor]], residency: Residency) -> None:
        self.state = _ThreadState(Prefetcher(units, residency))


def _unmark(tensors: Iterable[OffloadedTensor]) -> None:
    for tensor in tensors:
        make_ordinary(tensor.tensor)
