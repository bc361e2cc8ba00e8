"""External loaders, of other classes than torch's: their batches are distributed whole, in turn."""

import logging
from collections.abc import Iterator, Mapping
from inspect import isgenerator
from itertools import islice
from typing import Any

from torch import Generator
from torch.utils.data import IterableDataset

from drivetrain_data._nested import leading_size, leading_sizes
from drivetrain_data.randomness.generators import KeyedDraws, load_plain_states
from drivetrain_data.sampling.sample_signature import signature_of
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sampling.step_info import BatchPlan, look_ahead
from drivetrain_data.sampling.whole_batches import cut_into_steps, distribute, plan_of_batches
from drivetrain_data.sources.batch_source import BatchSource, Reading, StepOrigin
from drivetrain_data.sources.torch_loader import rebuild
from drivetrain_data.sources.wrapped_datasets import epoch_parts
from drivetrain_data.state.integrations import left_out_of_state
from drivetrain_data.state.sampler_parts import length_of, prepare_sampler
from drivetrain_data.state.stream_state import PositionedSnapshot, ReadPosition, Snapshotter
from drivetrain_data.state.torchdata_state import num_yielded

logger = logging.getLogger(__name__)


class ExternalSource(BatchSource):
    """A source that reads any iterable of batches, `shard.count` batches per step, from the start in each loop.

    Seed and epoch seed the iterable's own generators and, during reads, the global generators.
    """

    def __init__(self, loader: Any, sharding: DataSharding) -> None:
        self._name = type(loader).__name__
        sharding.check_unsplit(f"batches of {self._name} are distributed whole")
        sharding.check_interleaved(f"the batches of {self._name} are distributed in turn")
        super().__init__(loader, sharding, stride=sharding.shard.count, batch_size=None)
        self._loader = loader
        stream = self.dataset if isinstance(self.dataset, IterableDataset) else None
        self._left_out = left_out_of_state(stream, getattr(loader, "num_workers", 0))
        self._snapshotter = Snapshotter(loader, trusted=self._left_out is None)
        self._received = ReadPosition.beginning(0)
        self._num_signed = 0  # steps whose batches were described
        self._has_warned = False  # about batches of unknown size

    @property
    def order_source(self) -> str:
        """The origin of the order, as a phrase for users."""
        if self.sharding.shard.count == 1:
            return f"the batches of {self._name} as they come"
        return f"the batches of {self._name}, distributed in turn; it must yield the same on every rank that reads"

    def move_to(self, epoch: int, position: int) -> None:
        """Move to a position; in a new epoch, forget the snapshots of the old epoch."""
        self._received.move_to(epoch, position)

    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read an epoch from a position on, one step ahead, since only the loader knows when it ends."""
        prepare_sampler(self._loader, self.seed, epoch)
        for part in epoch_parts(self.dataset):
            part.set_epoch(epoch)
        steps = KeyedDraws(self.seed, epoch).around(self._steps_from(position))
        first: list[Any] = []
        for (step, origin), is_last in look_ahead(steps):
            first = first or step
            held = distribute(step, first, self.sharding)
            plan = self._plan(held, num_new=len(step), is_last=is_last)
            if self.sharding.for_all:  # also a batch without samples is its shard's own
                yield plan, held if self.sharding.even == "pad" else held[: len(step)], origin
            else:
                yield plan, held[self.sharding.shard.index], origin

    def initial_state(self) -> dict[str, Any]:
        """Return the state that torchdata's loader has at the beginning of an epoch."""
        size, drops = self._loader.batch_size, self._loader.drop_last
        reader: Any = rebuild(self._loader, self.dataset, Generator(), batch_size=size, drop_last=drops)
        return reader.state_dict()

    def num_before(self, position: int) -> tuple[int, int | None]:
        """Return the numbers of batches and samples that torchdata's loader has yielded before a position."""
        size = self._loader.batch_size
        return position, None if size is None else position * size

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return the position at which torchdata's loader has a given state."""
        return num_yielded(state)

    def note_received(self, plan: BatchPlan, origin: StepOrigin) -> None:
        """Count the received batches, and keep the snapshot of the loader."""
        super().note_received(plan, origin)
        self._received.receive(plan.advance, origin.worker, origin.snapshot)

    def length(self, _epoch: int) -> int:
        """Return the number of batches in an epoch."""
        return len(self._loader)

    def identity(self) -> Mapping[str, Any]:
        """Return the values that must match those of a saved state."""
        return {"order": f"loader:{self._name}"}

    def facts(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks that share the data."""
        return {**super().facts(), "num_batches": length_of(self._loader)}

    def extra_state(self, _epoch: int, position: int) -> Mapping[str, Any]:
        """Return the loader's own state; empty for a loader without one, which must yield the same batches again."""
        (last,) = self._received.snapshots  # a snapshot is called a stand in state format 1
        return {"stand": last._asdict()} if position and last is not None else {}

    def load_extra_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Load the loader's own state."""
        self._received = ReadPosition.beginning(epoch)
        if "stand" in state:
            self._received.snapshots = [PositionedSnapshot(**state["stand"])]

    def _steps_from(self, position: int) -> Iterator[tuple[list[Any], StepOrigin]]:
        """Yield the batches of each step from a position on, and its origin."""
        for step in cut_into_steps(self._batches_from(position), self.stride, self.sharding.even):
            if self.sharding.compares_streams and self._num_signed < 2:  # one is read ahead
                places = ((self._num_signed, at) for at in range(len(step)))
                self.signatures.update(zip(places, map(signature_of, step), strict=True))
                self._num_signed += 1
            # Take the state now, because the next step is read before this one is yielded to the loop.
            if self.states is None:
                yield step, StepOrigin(0, self._snapshotter.take())
            else:
                yield step, StepOrigin(0, self._snapshotter.take(), self.states.take(self._loader))

    def _batches_from(self, position: int) -> Iterator[Any]:
        read = self._received
        if self.states is not None:
            has_state = self.states.loaded is not None
            self.states.begin(self._loader, 0)
            if has_state:
                return iter(self._loader)
        if not position:
            return iter(self._loader)
        if self.sharding.is_first_reader:
            read.warn_if_read_again(position, "batch", of=self._name, reader="it", left_out=self._left_out)
        (last,) = read.snapshots
        if last is None:
            return islice(iter(self._loader), position, None)
        self._loader.load_state_dict(last.snapshot["reader"])
        batches = iter(self._loader)
        # A generator starts only at its first batch, and then repeats the draws of the epoch's start.
        if not isgenerator(batches):
            load_plain_states(last.snapshot["generators"])
        return islice(batches, position - last.received, None)

    def _plan(self, held: list[Any], *, num_new: int, is_last: bool) -> BatchPlan:
        """Return a step's plan, with sizes guessed from its batches."""
        guessed = [leading_size(batch) for batch in held]
        sizes = [size for size in guessed if size is not None]
        are_known = len(sizes) == len(held)
        if not are_known and self.stride > 1 and not self._has_warned:
            self._has_warned = True
            shown = ", ".join(map(str, sorted(leading_sizes(held[guessed.index(None)]))))
            logger.warning(
                "a batch of %s does not say how many samples it holds (%s): every batch weighs the same, whatever "
                "its size, in a mean over ranks; to weigh samples, give a sum and their number: "
                "backward(loss_sum, count=...)",
                self._name,
                f"its parts have sizes {shown}" if shown else "no part of it has a size",
            )
        counts = [*(sizes if are_known else [1] * num_new)[:num_new], *[0] * (len(held) - num_new)]
        known = sizes if are_known else None
        return plan_of_batches(counts, known, self.sharding, advance=num_new, is_last=is_last, guessed=True)
