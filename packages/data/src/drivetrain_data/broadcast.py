"""Dispatch: one rank reads, and every rank receives its batches.

A step is one broadcast, as large as the step before was; a step that has outgrown it takes a second one for the rest.
Structure, shapes and what is known of the step travel along only when they change. A reader that fails sends its
traceback in place of a batch, so that no rank waits for one.
"""

import traceback
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from drivetrain_data.batch_plan import BatchPlan
from drivetrain_data.errors import DispatchError
from drivetrain_data.packing import Bytes, Layout, pack, take_apart, unpack_batch, unpack_layout, used_bytes
from drivetrain_data.settings import Even
from drivetrain_data.shard import Shard
from drivetrain_data.source import Source

_FIRST_BYTES = 4096


class DispatchSource:
    """Hands out what a source reads on the first rank of a group. Every method is called on all of its ranks.

    Args:
        inner: Reads for all shards. It is opened on the first rank alone.
        group: The ranks that receive.
        shard: Which batch of a step is this rank's.
        even: What becomes of the tail.
        device: What the group communicates on, if it cannot on the CPU.
        read_ahead: Start sending the next step before the current one is given to the loop.
    """

    reads_for_all = False

    def __init__(
        self,
        inner: Source,
        *,
        group: dist.ProcessGroup,
        shard: Shard,
        even: Even,
        device: torch.device | None,
        read_ahead: bool,
    ) -> None:
        self._inner = inner
        self._shard = shard
        self._padded = even == "pad"
        self._is_reader = dist.get_rank(group) == 0
        self._channel = Channel(group, _transport_device(group, device))
        self._read_ahead = read_ahead
        self._sent: Layout | None = None
        self._received: Layout | None = None

    @property
    def seed(self) -> int:
        """What the order of every epoch depends on."""
        return self._inner.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._inner.seed = seed

    @property
    def order_source(self) -> str:
        """Where the order comes from."""
        return f"{self._inner.order_source.split('; ')[0]}; read by one rank, which hands out every rank's batches"

    def open(self, epoch: int, position: int) -> Iterator[tuple[BatchPlan, Any]]:
        """Read or receive an epoch."""
        steps = self._send(epoch, position) if self._is_reader else self._receive()
        try:
            yield from steps
        finally:
            steps.close()
            self._channel.settle()

    def num_steps(self) -> int:
        """The steps of a whole epoch."""
        return self._inner.num_steps()

    def position_after(self, epoch: int, position: int, num_steps: int) -> int:
        """The position when `num_steps` steps from `position` are done."""
        return self._inner.position_after(epoch, position, num_steps)

    def identity(self) -> Mapping[str, Any]:
        """What a saved state must agree on."""
        return self._inner.identity()

    def extra_state(self) -> Mapping[str, Any]:
        """What a state must hold besides the position; known to the reader."""
        return self._inner.extra_state()

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._inner.take_up(state)

    def _send(self, epoch: int, position: int) -> Generator[tuple[BatchPlan, Any]]:
        steps = self._inner.open(epoch, position)
        step = self._read(steps)
        self._post(step)
        while step is not None:
            plan, batches = step
            if self._read_ahead:
                step = self._read(steps)
                self._post(step)
            yield plan, batches[min(self._shard.index, len(batches) - 1)]
            if not self._read_ahead:
                step = self._read(steps)
                self._post(step)

    def _read(self, steps: Iterator[tuple[BatchPlan, Any]]) -> tuple[BatchPlan, Any] | None:
        try:
            return next(steps, None)
        except Exception:  # told to every rank, and raised here too
            self._post_note(traceback.format_exc())
            raise

    def _post(self, step: tuple[BatchPlan, Any] | None) -> None:
        if step is None:
            self._post_note(None)
            return
        plan, batches = step
        message = take_apart(plan, batches)
        with_layout = message.layout != self._sent
        self._sent = message.layout
        packed, used = pack(message, with_layout=with_layout, capacity=self._channel.capacity)
        self._channel.send(packed, used, complete=not self._read_ahead)

    def _post_note(self, note: str | None) -> None:
        message = take_apart(note, ())
        self._sent = None
        packed, used = pack(message, with_layout=True, capacity=self._channel.capacity)
        self._channel.send(packed, used, complete=not self._read_ahead)

    def _receive(self) -> Generator[tuple[BatchPlan, Any]]:
        while True:
            packed = self._channel.receive()
            layout = unpack_layout(packed)
            if layout is not None:
                self._received = layout = self._for_this_shard(layout)
            else:
                layout = self._received
            assert layout is not None
            if not isinstance(layout.note, BatchPlan):
                if layout.note is not None:
                    raise DispatchError(f"the rank that reads for all failed:\n{layout.note}")
                return
            if self._read_ahead:
                self._channel.expect()
            own = min(self._shard.index, len(layout.batches) - 1)
            yield layout.note, unpack_batch(packed, layout, own)

    def _for_this_shard(self, layout: Layout) -> Layout:
        plan = layout.note
        if not isinstance(plan, BatchPlan):
            return layout
        assert plan.real_counts is not None
        replayed = plan.real_counts[self._shard.index] == 0 and not self._padded
        return replace(layout, note=replace(plan, replayed=replayed))


class Channel:
    """Messages from a group's first rank to the others, in the same order on every rank.

    Args:
        group: The ranks.
        device: What they communicate on.

    Attributes:
        capacity: The bytes of the first broadcast of the next message, which all ranks know.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._source = dist.get_global_rank(group, 0)
        self._under_way: list[tuple[Any, torch.Tensor]] = []
        self._rest: tuple[torch.Tensor, int] | None = None
        self._expected: tuple[Any, torch.Tensor] | None = None
        self.capacity = _FIRST_BYTES

    def send(self, packed: Bytes, used: int, *, complete: bool) -> None:
        """Start sending. Called on the first rank.

        Args:
            packed: The message, at least `capacity` bytes.
            used: Its length.
            complete: Send what goes beyond `capacity` at once, and not only at the next call.
        """
        self.settle()
        tensor = torch.from_numpy(packed).to(self._device)
        self._under_way.append((self._broadcast(tensor[: self.capacity]), tensor))
        self._rest = (tensor, used)
        if complete:
            self._send_rest()

    def settle(self) -> None:
        """Finish what was started: the reader waits for its last message, others take one they expected."""
        if self._expected is not None:
            self.receive()
        self._send_rest()
        started, self._under_way = self._under_way, []
        for work, _ in started:
            work.wait()

    def expect(self) -> None:
        """Start receiving. Called on the other ranks."""
        tensor = torch.empty(self.capacity, dtype=torch.uint8, device=self._device)
        self._expected = (self._broadcast(tensor), tensor)

    def receive(self) -> Bytes:
        """The next message. Called on the other ranks."""
        if self._expected is None:
            self.expect()
        assert self._expected is not None
        work, tensor = self._expected
        self._expected = None
        work.wait()
        used = used_bytes(tensor[:64].cpu().numpy())
        if used > self.capacity:
            whole = torch.empty(used, dtype=torch.uint8, device=self._device)
            whole[: self.capacity] = tensor
            self._broadcast(whole[self.capacity :]).wait()
            tensor = whole
        self.capacity = _next_capacity(used)
        return tensor.cpu().numpy()

    def _send_rest(self) -> None:
        if self._rest is None:
            return
        tensor, used = self._rest
        self._rest = None
        if used > self.capacity:
            self._under_way.append((self._broadcast(tensor[self.capacity : used]), tensor))
        self.capacity = _next_capacity(used)

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        return dist.broadcast(tensor, self._source, group=self._group, async_op=True)


def _next_capacity(used: int) -> int:
    """A little more than the last message took, so that strings of another length still fit."""
    return max(_FIRST_BYTES, -(-(used + used // 16) // 1024) * 1024)


def _transport_device(group: dist.ProcessGroup, device: torch.device | None) -> torch.device:
    """The CPU where the group can, since what is read lies there; else the ranks' accelerator."""
    backends = dist.get_backend_config(group)
    if "cpu" in backends or device is None:
        return torch.device("cpu")
    return device
