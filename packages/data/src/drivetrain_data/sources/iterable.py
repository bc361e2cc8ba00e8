"""Iterable datasets: a fetch reads a step's samples, and the collate function splits the samples among the shards."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader

from drivetrain_data.errors import DataStateError
from drivetrain_data.randomness.generators import KeyedDraws
from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.sampling.partition import step_plan
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sampling.step_info import BatchPlan, look_ahead
from drivetrain_data.sources.batch_source import BatchSource, Reading, StepOrigin
from drivetrain_data.sources.shard_collate import CollatedStep, ShardCollate
from drivetrain_data.sources.torch_loader import rebuild
from drivetrain_data.sources.wrapped_datasets import epoch_parts
from drivetrain_data.state.integrations import left_out_of_state, own_draws, shuffles_unseeded
from drivetrain_data.state.sampler_parts import length_of
from drivetrain_data.state.stream_state import (
    EpochReader,
    EpochStream,
    PositionedSnapshot,
    ReadPosition,
    Snapshotter,
)

logger = logging.getLogger(__name__)


class IterableSource(BatchSource):
    """A source that reads an iterable dataset step by step, in the dataset's order, with workers taking turns.

    The dataset's draws from the global generators depend only on the seed, the epoch and the worker; one worker
    draws the same as none. If every rank reads the whole dataset, all ranks therefore read the same samples.
    """

    def __init__(self, loader: DataLoader[Any], sharding: DataSharding) -> None:
        sharding.check_interleaved("an iterable dataset is distributed in turn")
        if loader.batch_size is None:
            sharding.check_unsplit("with batch_size=None there are no batches to split")
        size = None if loader.batch_size is None else sharding.size_on_each(loader.batch_size)
        super().__init__(loader, sharding, stride=(size or 1) * sharding.shard.count, batch_size=size)
        self._name = type(self.dataset).__name__
        self._check_seeded()
        self._num_workers = max(1, loader.num_workers)
        self._reads_here = loader.num_workers == 0
        self._left_out = left_out_of_state(self.dataset, loader.num_workers)
        self._reader = EpochReader(
            self.dataset,
            num_workers=loader.num_workers,
            stride=self.stride,
            persistent=loader.persistent_workers,
            trusted=self._left_out is None,
            listeners=epoch_parts(self.dataset, collate=loader.collate_fn),
        )
        snapshotter = Snapshotter(self.dataset if self._reads_here else None, trusted=self._left_out is None)
        self._collate = ShardCollate(loader.collate_fn, size, sharding, snapshotter)
        self._generator = Generator()
        self._loader = self._build()
        self._own_draws = self._saved_draws = own_draws(self.dataset)
        self._received = ReadPosition.beginning(0, self._num_workers)

    @property
    def order_source(self) -> str:
        """The origin of the order, as a phrase for users."""
        if self.sharding.shard.count == 1:
            return f"the order in which {self._name} yields"
        return (
            f"the order in which {self._name} yields; each rank reads all of it and keeps its part, so that it must "
            "yield the same on every rank"
        )

    def move_to(self, epoch: int, position: int) -> None:
        """Move to a position; in a new epoch, forget the saved state of the old epoch."""
        if not position or epoch != self._received.epoch:
            self._saved_draws = self._own_draws
        self._received.move_to(epoch, position)

    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read an epoch from a position on, one step ahead, since only the dataset knows when it ends."""
        self._generator.manual_seed(hash_key(self.seed, epoch) >> 1)
        steps: Iterator[CollatedStep] = filter(self._has_samples, self._steps_from(epoch, position))
        if self._reads_here:
            steps = KeyedDraws(self.seed, epoch, 0).around(steps)
        full = self._plan(self.stride, is_last=False)
        for step, is_last in look_ahead(steps):
            is_full = step.num_samples == self.stride and not is_last
            plan = full if is_full else self._plan(step.num_samples, is_last=is_last)
            yield plan, step.batches if self.sharding.for_all else step.batches[0], step.origin

    def note_received(self, plan: BatchPlan, origin: StepOrigin) -> None:
        """Count the samples received from a worker, and keep the snapshot of its dataset."""
        self._received.receive(plan.advance, origin.worker, origin.snapshot)

    def length(self, _epoch: int) -> int:
        """Return the number of samples in an epoch; TypeError if several workers read it."""
        num_samples = len(self.dataset)
        if self._num_workers > 1:
            raise TypeError(
                f"the steps of a stream that {self._num_workers} workers read cannot be counted beforehand: only "
                f"{self._name} knows how they share its {num_samples} samples, and each may end with a batch that is "
                "not full; use num_workers=0 or 1, or do without len()"
            )
        return num_samples

    def identity(self) -> Mapping[str, Any]:
        """Return the values that must match those of a saved state."""
        return {
            "order": f"stream:{self._name}",
            "num_positions": length_of(self.dataset),
            "num_workers": self._num_workers,
        }

    def extra_state(self, _epoch: int, position: int) -> Mapping[str, Any]:
        """Return the number of samples received from each worker and, if available, its dataset's state."""
        found: dict[str, Any] = {}
        if not position:
            return found
        snapshots = self._received.snapshots
        if self._num_workers > 1:
            found.update(received=list(self._received.received), next_worker=self._received.next_worker)
        if any(snapshots):  # which are called stands in state format 1
            found["stands"] = [None if it is None else it._asdict() for it in snapshots]
        if self._saved_draws is not None:
            found["own_draws"] = self._saved_draws
        return found

    def load_extra_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Load the saved state of each worker."""
        self._received = read = ReadPosition.beginning(epoch, self._num_workers)
        read.received = list(state.get("received", read.received))
        read.next_worker = state.get("next_worker", 0)
        if "stands" in state:
            read.snapshots = [None if it is None else PositionedSnapshot(**it) for it in state["stands"]]
        self._saved_draws = state.get("own_draws", self._own_draws)

    def _build(self) -> DataLoader[Any]:
        return rebuild(
            self._users_loader,
            EpochStream(self._reader),
            self._generator,
            batch_size=self.stride,
            collate_fn=self._collate,
            drop_last=self.sharding.even == "drop",
        )

    def _plan(self, num_samples: int, *, is_last: bool) -> BatchPlan:
        shard, size = self.sharding.shard, self.batch_size or 1
        return step_plan(
            num_samples, shard.count, size, self.sharding.even, shard=shard.index, is_last=is_last
        )

    def _steps_from(self, epoch: int, position: int) -> Iterator[CollatedStep]:
        if position == 0:
            self._reader.begin(self.seed, epoch)
            return iter(self._loader)
        if sum(self._received.received) != position:
            raise RuntimeError(
                f"position {position} of a stream read by {self._num_workers} workers cannot be found without "
                "reading: batches can be skipped with num_workers=0 or 1, and a saved state can be loaded"
            )
        if self._saved_draws != self._own_draws:
            raise DataStateError(
                f"{self._name} shuffles with another generator or buffer than the one that was saved in the middle "
                "of an epoch, and would yield in another order; give its shuffle() the same seed= and buffer_size= "
                "in every run, or start the epoch anew"
            )
        if self.sharding.is_first_reader:
            self._received.warn_if_read_again(
                position, "sample", of="a stream", reader=self._name, left_out=self._left_out
            )
        self._reader.begin(self.seed, epoch, self._received.copy())
        # Persistent workers have started already and cannot take a new start: build a loader with workers of its own.
        return iter(self._build())

    def _check_seeded(self) -> None:
        """Raise ValueError if several ranks read a stream shuffled without a seed, each in a different order."""
        if not shuffles_unseeded(self.dataset):
            return
        shard = self.sharding.shard
        if shard.count > 1 and not self.sharding.for_all:
            raise ValueError(
                f"{self._name} is shuffled without a seed, so in another order on each of {shard.count} ranks that "
                "read it: give its shuffle() a seed=, or let one rank read for all, with dispatch=True"
            )
        if shard.index == 0:
            logger.warning(
                "%s is shuffled without a seed: an epoch cannot be resumed in its middle; give its shuffle() a "
                "seed=",
                self._name,
            )

    def _has_samples(self, step: CollatedStep) -> bool:
        self.signatures.update(step.signatures)
        return step.num_samples > 0
