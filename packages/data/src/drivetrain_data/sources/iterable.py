"""Iterable datasets: one fetch reads a step's samples, and the collate function splits them among the shards."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Generator
from torch.utils.data import DataLoader, get_worker_info

from drivetrain_data.errors import DataStateError
from drivetrain_data.randomness.generators import KeyedDraws
from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.sampling.partition import step_plan, tail_counts
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.settings import UnevenPolicy
from drivetrain_data.shard import Shard
from drivetrain_data.sources.base import Mark, Reading
from drivetrain_data.state.integrations import own_draws
from drivetrain_data.state.stream_state import PLACEHOLDER, EpochReader, Snapshots, Stand, Start

logger = logging.getLogger(__name__)


class Dealt(NamedTuple):
    """A step as it comes from the dataset.

    Attributes:
        num_samples: The number of samples read for all shards; 0 if a worker skips its turn.
        mark: The worker that read the samples, and occasionally the state of its dataset after them.
        batches: A list of this shard's batch, or of the batches of all shards that have their own.
    """

    num_samples: int
    mark: Mark
    batches: list[Any]


class DealingCollate:
    """A collate function that splits a step's samples into one batch per shard and collates the requested batches.

    Args:
        collate: The user's collate function; takes a list of samples, or one sample if `batch_size` is None.
        batch_size: The number of samples in a batch on each shard; None for datasets that yield batches themselves.
        shard: The shard whose batch is requested.
        even: The treatment of the tail; padding repeats the tail's own samples.
        reads_for_all: Whether the batches of all shards are requested.
        snapshots: The snapshots to take of the dataset's state from time to time.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        batch_size: int | None,
        shard: Shard,
        even: UnevenPolicy,
        *,
        reads_for_all: bool,
        snapshots: Snapshots,
    ) -> None:
        self.collate = collate
        self.batch_size = batch_size
        self.shard = shard
        self.even: UnevenPolicy = even
        self.reads_for_all = reads_for_all
        self.snapshots = snapshots

    def __call__(self, samples: list[Any]) -> Dealt:
        """Split and collate the samples of a step."""
        info = get_worker_info()
        if samples[0] is PLACEHOLDER:
            return Dealt(0, Mark(info.id if info else 0), [])
        size = self.batch_size or 1
        counts = tail_counts(len(samples), self.shard.count, size, self.even)
        if self.reads_for_all:
            wanted: Iterable[int] = range(
                self.shard.count if self.even == "pad" else sum(c > 0 for c in counts)
            )
        else:
            wanted = (self.shard.index,)
        batches: list[Any] = []
        for shard in wanted:
            if self.even == "pad":
                chosen = [samples[(shard * size + i) % len(samples)] for i in range(size)]
            else:
                begin = sum(counts[:shard])
                chosen = samples[begin : begin + counts[shard]] or samples[-1:]
            batches.append(self.collate(chosen[0] if self.batch_size is None else chosen))
        # Take the snapshot last, since collating may draw from the generators too.
        return Dealt(len(samples), Mark(info.id if info else 0, self.snapshots.take()), batches)


class StreamSource:
    """A source that reads an iterable dataset step by step, in the dataset's order, with workers taking turns.

    What the dataset draws from the global generators depends only on the seed, the epoch and the worker; one worker
    draws the same as none. Ranks that each read the whole dataset therefore read the same samples.

    Args:
        build: A function that builds the DataLoader over `reader`.
        reader: The reader that starts the epochs of the user's dataset.
        collate: The collate function of the DataLoader.
        generator: The generator of the DataLoader, which seeds its workers; this source seeds it.
        num_workers: The number of workers of the DataLoader.
        seed: The seed of all draws, together with the epoch.
        left_out: The part that the dataset's own state lacks, so that the state is not used; None if it is complete.
    """

    def __init__(
        self,
        build: Callable[[], DataLoader[Any]],
        reader: EpochReader,
        collate: DealingCollate,
        generator: Generator,
        *,
        num_workers: int,
        seed: int,
        left_out: str | None,
    ) -> None:
        self._build = build
        self._reader = reader
        self._dataset = reader.stream
        self._collate = collate
        self._generator = generator
        self._loader = build()
        self._num_workers = max(1, num_workers)
        self._reads_here = num_workers == 0
        self._left_out = left_out
        self._own_draws = self._saved_draws = own_draws(self._dataset)
        self._epoch = 0  # the epoch that the state of the workers below belongs to
        self._forget()
        self.seed = seed
        self.reads_for_all = collate.reads_for_all

    @property
    def order_source(self) -> str:
        """The origin of the order, as a phrase for users."""
        name = type(self._dataset).__name__
        if self._collate.shard.count == 1:
            return f"the order in which {name} yields"
        return (
            f"the order in which {name} yields; each rank reads all of it and keeps its part, so that it must yield "
            "the same on every rank"
        )

    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read an epoch from a position on, one step ahead, since only the dataset knows when it ends."""
        self._generator.manual_seed(hash_key(self.seed, epoch) >> 1)
        drawing = KeyedDraws(self.seed, epoch, 0).active if self._reads_here else nullcontext
        steps = filter(_has_samples, self._begun(epoch, position))
        shard, size, even = self._collate.shard, self._collate.batch_size or 1, self._collate.even
        full = step_plan(size * shard.count, shard.count, size, even, shard=shard.index, is_last=False)
        with drawing():
            following = next(steps, None)
        while following is not None:
            dealt = following
            with drawing():
                following = next(steps, None)
            plan = full
            if following is None or dealt.num_samples != full.advance:
                last = following is None
                plan = step_plan(dealt.num_samples, shard.count, size, even, shard=shard.index, is_last=last)
            yield plan, dealt.batches if self.reads_for_all else dealt.batches[0], dealt.mark

    def note_received(self, plan: BatchPlan, mark: Mark) -> None:
        """Count the samples received from a worker, and keep the snapshot of its dataset."""
        self._received[mark.worker] += plan.advance
        self._next_worker = (mark.worker + 1) % self._num_workers
        if mark.snapshot is not None:
            self._stands[mark.worker] = Stand(self._received[mark.worker], mark.snapshot)

    def num_steps(self, _epoch: int, position: int) -> int:
        """Return the number of steps of an epoch from a position on.

        Raises:
            TypeError: The number is unknown: the dataset has no length, or several workers read it.
        """
        num_samples = len(self._dataset)  # pyright: ignore[reportArgumentType]
        if self._num_workers > 1:
            raise TypeError(
                f"the steps of a stream that {self._num_workers} workers read cannot be counted beforehand: only "
                f"{type(self._dataset).__name__} knows how they share its {num_samples} samples, and each may end "
                "with a batch that is not full; use num_workers=0 or 1, or do without len()"
            )
        stride = (self._collate.batch_size or 1) * self._collate.shard.count
        whole, rest = divmod(max(0, num_samples - position), stride)
        return whole + (self._collate.even != "drop" and rest > 0)

    def position_after(self, _epoch: int, position: int, num_steps: int) -> int:
        """Return the position `num_steps` steps after `position`; exact without workers."""
        return position + num_steps * (self._collate.batch_size or 1) * self._collate.shard.count

    def identity(self) -> Mapping[str, Any]:
        """Return the values that must match those of a saved state."""
        return {
            "order": f"stream:{type(self._dataset).__name__}",
            "num_positions": _length_of(self._dataset),
            "num_workers": self._num_workers,
        }

    def extra_state(self, _epoch: int, position: int) -> Mapping[str, Any]:
        """Return the number of samples received from each worker and, if it has one, its dataset's state."""
        found: dict[str, Any] = {}
        if not position:
            return found
        if self._num_workers > 1:
            found.update(received=list(self._received), next_worker=self._next_worker)
        if any(self._stands):
            found["stands"] = [None if stand is None else stand._asdict() for stand in self._stands]
        if self._saved_draws is not None:
            found["own_draws"] = self._saved_draws
        return found

    def take_up(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Load the saved state of each worker."""
        self._forget()
        self._epoch = epoch
        self._received = list(state.get("received", self._received))
        self._next_worker = state.get("next_worker", 0)
        stands = state.get("stands", self._stands)
        self._stands = [None if stand is None else Stand(**stand) for stand in stands]
        self._saved_draws = state.get("own_draws", self._own_draws)

    def _forget(self) -> None:
        self._received = [0] * self._num_workers  # the number of samples received from each worker
        self._stands: list[Stand | None] = [None] * self._num_workers
        self._next_worker = 0
        self._saved_draws = self._own_draws

    def _begun(self, epoch: int, position: int) -> Iterator[Dealt]:
        if position == 0 or epoch != self._epoch:
            self._forget()
        self._epoch = epoch
        if position == 0:
            self._reader.begin(self.seed, epoch)
            return iter(self._loader)
        if self._num_workers == 1:
            self._received = [position]
            # Drop a snapshot beyond the position: the epoch may have been read further before.
            self._stands = [it if it is not None and it.received <= position else None for it in self._stands]
        self._check_found(position)
        known = sum(stand.received for stand in self._stands if stand is not None)
        shard, name = self._collate.shard, type(self._dataset).__name__
        if known < position and (self.reads_for_all or shard.index == 0):
            logger.warning(
                "going on at sample %d of a stream: %s is read and dropped %s%s",
                position,
                name,
                f"from sample {known} on, where its own state ends" if known else "up to there",
                "" if self._left_out is None else f", since its own state leaves out {self._left_out}",
            )
        start = Start(tuple(self._received), tuple(self._stands), self._next_worker)
        self._reader.begin(self.seed, epoch, start)
        # Persistent workers have started already and cannot take a new start: build a loader with workers of its own.
        return iter(self._build())

    def _check_found(self, position: int) -> None:
        name = type(self._dataset).__name__
        if sum(self._received) != position:
            raise RuntimeError(
                f"position {position} of a stream read by {self._num_workers} workers cannot be found without "
                "reading: batches can be skipped with num_workers=0 or 1, and a saved state can be loaded"
            )
        if self._saved_draws != self._own_draws:
            raise DataStateError(
                f"{name} shuffles with another generator or buffer than the one that was saved in the middle of an "
                "epoch, and would yield in another order; give its shuffle() the same seed= and buffer_size= in "
                "every run, or start the epoch anew"
            )


def _has_samples(dealt: Dealt) -> bool:
    return dealt.num_samples > 0


def _length_of(dataset: Any) -> int | None:
    """Return the length of a stream, or None if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
