"""Dispatch: one rank reads, and every rank receives its own batches.

Small steps that are read quickly share a message. The structure, the shapes and the plan of a step are sent only when
they change. A reader that fails sends its traceback in place of a batch, so that no rank waits forever.
"""

import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from time import perf_counter_ns
from typing import NamedTuple

import torch
import torch.distributed as dist

from drivetrain_data.errors import DispatchError
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.shard import Shard
from drivetrain_data.sources.batch_source import Reading, StepOrigin
from drivetrain_data.transport.message import Incoming, Layout, Outgoing, SeparatedBatch, take_apart
from drivetrain_data.transport.scatter import ScatterChannel, transport_device
from drivetrain_data.transport.shared_memory import meet

_NO_WORKER = -1
_GROUP_BYTES = 2**18  # for each rank; larger messages cost no less per step
_GROUP_NANOSECONDS = 3_000_000  # the longest time that a step waits for others to share its message


class _Read(NamedTuple):
    """A step and its batches, separated for sending."""

    reading: Reading
    steps: list[SeparatedBatch]  # one for each batch

    @property
    def layouts(self) -> list[Layout]:
        return [step.layout for step in self.steps]


class Rank0Dispatch:
    """A stage behind a source: the group's first rank reads, and sends each rank its batches.

    Every method is called on all ranks of the group. Messages go over the CPU if the group supports it, else over
    `device`. With `read_ahead`, the next message is sent before the loop gets the current message's batches.
    """

    def __init__(
        self, group: dist.ProcessGroup, shard: Shard, *, device: torch.device | None, read_ahead: bool
    ) -> None:
        self._shard = shard
        self._is_reader = dist.get_rank(group) == 0
        # Shared memory, if all ranks run on one Linux machine.
        self._channel = meet(group) or ScatterChannel(group, transport_device(group, device))
        self._shards = _gather_shards(group, shard)
        self._read_ahead = read_ahead
        self._loop = 0  # the number of loops started
        self._sent: list[Layout] = []
        self._received: Layout | None = None

    def describe(self, order_source: str) -> str:
        """Return the origin of the order and the transport of its batches, as a phrase for users."""
        order = order_source.split("; ")[0]
        return f"{order}; read by one rank, which hands out every rank's batches through {self._channel.name}"

    def dispatched(self, open_source: Callable[[], Iterator[Reading]]) -> Iterator[Reading]:
        """Read for all shards on the first rank; receive on the others. Only the first calls `open_source`."""
        self._loop += 1
        self._sent = []  # a receiver may have left a message unread, and so lack the layout sent in it
        steps = self._send(open_source) if self._is_reader else self._receive()
        try:
            yield from steps
        finally:
            steps.close()
            self._channel.settle()

    def _send(self, open_source: Callable[[], Iterator[Reading]]) -> Generator[Reading]:
        try:
            groups = self._groups(open_source())
            group = self._post(next(groups, []))
            while group:
                held, error = group, None
                if self._read_ahead:
                    try:
                        group = self._post(next(groups, []))
                    except (Exception, SystemExit) as raised:  # noqa: BLE001 raised below, after the steps before it
                        error = raised
                for (plan, batches, origin), _ in held:
                    yield plan, batches[min(self._shard.index, len(batches) - 1)], origin
                if error is not None:
                    raise error
                if not self._read_ahead:
                    group = self._post(next(groups, []))
        except DispatchError:  # a receiving rank has exited, so there is no one to send an error to
            raise
        except (Exception, SystemExit):  # reading or packing failed: send the traceback to all ranks
            self._send_note(traceback.format_exc())
            raise

    def _groups(self, readings: Iterator[Reading]) -> Iterator[list[_Read]]:
        """Yield groups of steps that share a layout and a message; raise an error only after the steps before it."""
        group: list[_Read] = []
        begun = num_bytes = 0
        while True:
            try:
                reading = next(readings, None)
                read = reading and _Read(reading, [take_apart(reading[0], batch) for batch in reading[1]])
            except (Exception, SystemExit):
                if group:
                    yield group
                raise
            if read is None:
                break
            if group and (
                perf_counter_ns() - begun > _GROUP_NANOSECONDS
                or not _same_layouts(read.layouts, group[0].layouts)
            ):
                yield group
                group = []
            if not group:
                begun, num_bytes = perf_counter_ns(), 0
            group.append(read)
            num_bytes += read.steps[0].num_bytes
            if num_bytes >= _GROUP_BYTES:
                yield group
                group = []
        if group:
            yield group

    def _post(self, group: list[_Read]) -> list[_Read]:
        if not group:
            self._send_note(None)
            return group
        tags = [_NO_WORKER if origin is None else origin.worker for (_, _, origin), _ in group]
        layouts = group[0].layouts
        known = _same_layouts(layouts, self._sent)
        self._sent = layouts
        # A shard without a batch of its own repeats the last one.
        slots = [min(shard, len(layouts) - 1) for shard in self._shards[1:]]
        by_slot = {
            slot: Outgoing([read.steps[slot] for read in group], tags, loop=self._loop, with_layout=not known)
            for slot in set(slots)
        }
        self._channel.send([by_slot[slot] for slot in slots], complete=not self._read_ahead)
        return group

    def _send_note(self, note: str | None) -> None:
        self._sent = []
        message = Outgoing([take_apart(note, ())], [_NO_WORKER], loop=self._loop, with_layout=True)
        self._channel.send([message] * (len(self._shards) - 1), complete=not self._read_ahead)

    def _receive(self) -> Generator[Reading]:
        while True:
            message = Incoming(self._channel.receive())
            if message.loop != self._loop:
                raise RuntimeError(
                    f"this rank is in its loop {self._loop} over the loader, and the rank that reads for all sent a "
                    f"batch of its loop {message.loop}: all ranks must leave a loop at the same step"
                )
            if message.layout is not None:
                self._received, plan = message.layout, message.layout.note
                if isinstance(plan, BatchPlan):
                    own = replace(plan, replayed=plan.replays(self._shard.index))
                    self._received = replace(message.layout, note=own)
            layout = self._received
            assert layout is not None
            if not isinstance(layout.note, BatchPlan):
                if layout.note is not None:
                    raise DispatchError(f"the rank that reads for all failed:\n{layout.note}")
                return
            if self._read_ahead:
                self._channel.expect()
            for step, tag in enumerate(message.tags):
                yield layout.note, message.batch(layout, step), None if tag == _NO_WORKER else StepOrigin(tag)


def _same_layouts(one: list[Layout], other: list[Layout]) -> bool:
    return len(one) == len(other) and all(map(Layout.same, one, other))


def _gather_shards(group: dist.ProcessGroup, shard: Shard) -> list[int]:
    """Return the shard of each rank of a group, which must hold all of them. Called on all ranks of the group."""
    shards = [shard] * dist.get_world_size(group)
    dist.all_gather_object(shards, shard, group=group)
    if set(shards) != {Shard(index, shard.count) for index in range(shard.count)}:
        shown = ", ".join(f"{each.index} of {each.count}" for each in shards)
        raise ValueError(
            f"dispatch: the group's ranks hold the shards {shown}, and every shard needs a rank there: pass "
            "the group of all ranks that share the data, and the same count on each"
        )
    return [each.index for each in shards]
