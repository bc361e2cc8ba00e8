"""Dispatch: one rank reads, and every rank receives its batches.

A message is one broadcast, as large as the one before was; a message that has outgrown it takes a second one for the
rest. Small steps that are read fast share a message. Structure, shapes and what is known of a step travel along only
when they change. A reader that fails sends its traceback in place of a batch, so that no rank waits for one.
"""

import traceback
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from drivetrain_data.batch_plan import BatchPlan
from drivetrain_data.errors import DispatchError
from drivetrain_data.packing import HEADER_BYTES, Bytes, Layout, Step, Unpacked, pack, take_apart, used_bytes
from drivetrain_data.settings import Even
from drivetrain_data.shard import Shard
from drivetrain_data.source import Reading, Source

_FIRST_BYTES = 4096
_NO_WORKER = -1
_GROUP_BYTES = 2**16  # beyond, a message is no cheaper for holding more
_GROUP_NANOSECONDS = 1_000_000  # that a read step may wait for others


class _Read(NamedTuple):
    """A step as the reader has it, and as it is sent."""

    reading: Reading
    step: Step


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

    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read or receive an epoch."""
        steps = self._send(epoch, position) if self._is_reader else self._receive()
        try:
            yield from steps
        finally:
            steps.close()
            self._channel.settle()

    def note_received(self, plan: BatchPlan, worker: int) -> None:
        """A step has reached the loop."""
        self._inner.note_received(plan, worker)

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
        """What a state must hold besides the position; the same on every rank."""
        return self._inner.extra_state()

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._inner.take_up(state)

    def _send(self, epoch: int, position: int) -> Generator[Reading]:
        groups = self._groups(self._inner.open(epoch, position))
        group = self._post(next(groups, []))
        while group:
            held = group
            if self._read_ahead:
                group = self._post(next(groups, []))
            for (plan, batches, worker), _ in held:
                yield plan, batches[min(self._shard.index, len(batches) - 1)], worker
            if not self._read_ahead:
                group = self._post(next(groups, []))

    def _groups(self, steps: Iterator[Reading]) -> Iterator[list[_Read]]:
        """Steps of one layout, as many as are read in a moment; an error comes after the steps before it."""
        group: list[_Read] = []
        begun = num_bytes = 0
        while True:
            try:
                step = next(steps, None)
            except Exception:  # it is told to every rank, and raised here
                if group:
                    yield group
                self._tell(traceback.format_exc())
                raise
            if step is None:
                break
            plan, batches, worker = step
            read = _Read(step, take_apart(plan, batches, tag=_NO_WORKER if worker is None else worker))
            if group and (
                num_bytes >= _GROUP_BYTES
                or perf_counter_ns() - begun > _GROUP_NANOSECONDS
                or read.step.layout != group[0].step.layout
            ):
                yield group
                group = []
            if not group:
                begun, num_bytes = perf_counter_ns(), 0
            group.append(read)
            num_bytes += read.step.num_bytes
        if group:
            yield group

    def _post(self, group: list[_Read]) -> list[_Read]:
        if group:
            self._send_steps([read.step for read in group])
        else:
            self._tell(None)
        return group

    def _tell(self, note: str | None) -> None:
        self._send_steps([take_apart(note, ())])

    def _send_steps(self, steps: list[Step]) -> None:
        layout = steps[0].layout
        packed, used = pack(steps, with_layout=layout != self._sent, capacity=self._channel.capacity)
        self._sent = layout
        self._channel.send(packed, used, complete=not self._read_ahead)

    def _receive(self) -> Generator[Reading]:
        while True:
            message = Unpacked(self._channel.receive())
            if message.layout is not None:
                self._received = self._for_this_shard(message.layout)
            layout = self._received
            assert layout is not None
            if not isinstance(layout.note, BatchPlan):
                if layout.note is not None:
                    raise DispatchError(f"the rank that reads for all failed:\n{layout.note}")
                return
            if self._read_ahead:
                self._channel.expect()
            own = min(self._shard.index, len(layout.batches) - 1)
            for step in range(message.num_steps):
                worker = None if message.tags[step] == _NO_WORKER else message.tags[step]
                yield layout.note, message.batch(layout, step, own), worker

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
        used = used_bytes(tensor[:HEADER_BYTES].cpu().numpy())
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
