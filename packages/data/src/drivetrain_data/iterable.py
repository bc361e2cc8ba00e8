"""Iterable datasets: a step's samples are read in one go and dealt out by the collate function."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Generator
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from drivetrain_data.batch_plan import BatchPlan
from drivetrain_data.partition import step_plan, tail_counts
from drivetrain_data.permutation import hash_key
from drivetrain_data.rng import KeyedDraws
from drivetrain_data.settings import Even
from drivetrain_data.shard import Shard
from drivetrain_data.source import Mark, Reading
from drivetrain_data.stream_state import ResumedStream, Snapshots, Stand

logger = logging.getLogger(__name__)


class Dealt(NamedTuple):
    """A step as it comes from the dataset.

    Attributes:
        num_samples: The samples read for all shards.
        mark: The worker that read them, 0 without workers, and at times where its dataset stood after them.
        batches: This shard's batch, or those of all shards that have their own.
    """

    num_samples: int
    mark: Mark
    batches: list[Any]


class DealingCollate:
    """Cuts a step's samples into one batch a shard and collates what is wanted of them.

    Args:
        collate: The user's; takes a list of samples, or one sample if `batch_size` is None.
        batch_size: Samples of a batch on each shard; None for datasets that give batches themselves.
        shard: Whose batch is wanted.
        even: What becomes of a tail; padding repeats the tail's own samples.
        reads_for_all: All shards' batches are wanted.
        snapshots: Tells now and then where the dataset stands.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        batch_size: int | None,
        shard: Shard,
        even: Even,
        *,
        reads_for_all: bool,
        snapshots: Snapshots,
    ) -> None:
        self.collate = collate
        self.batch_size = batch_size
        self.shard = shard
        self.even: Even = even
        self.reads_for_all = reads_for_all
        self.snapshots = snapshots

    def __call__(self, samples: list[Any]) -> Dealt:
        """Cut and collate a step."""
        info = get_worker_info()
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
        # Only now, since collating may draw from the generators too.
        return Dealt(len(samples), Mark(info.id if info else 0, self.snapshots.take()), batches)


class StreamSource:
    """Reads an iterable dataset step by step; the order is that of the dataset, worker by worker in turn.

    What the dataset draws from the global generators depends on the seed and the epoch alone, in workers and without:
    ranks that each read all of it read the same.

    Args:
        build: Makes the DataLoader for a dataset: that of the user, or the same one started further on.
        dataset: The user's.
        collate: The loader's.
        generator: The loader's; seeds its workers and is seeded here.
        num_workers: The loader's.
        seed: What workers are seeded from, with the epoch.
    """

    def __init__(
        self,
        build: Callable[[IterableDataset[Any]], DataLoader[Any]],
        dataset: IterableDataset[Any],
        collate: DealingCollate,
        generator: Generator,
        *,
        num_workers: int,
        seed: int,
    ) -> None:
        self._build = build
        self._dataset = dataset
        self._collate = collate
        self._generator = generator
        self._loader = build(dataset)
        self._num_workers = max(1, num_workers)
        self._reads_here = num_workers == 0
        self._received = [0] * self._num_workers  # from each worker
        self._stands: list[Stand | None] = [None] * self._num_workers
        self.seed = seed
        self.reads_for_all = collate.reads_for_all

    @property
    def order_source(self) -> str:
        """Where the order comes from."""
        name = type(self._dataset).__name__
        if self._collate.shard.count == 1:
            return f"the order in which {name} yields"
        return (
            f"the order in which {name} yields; each rank reads all of it and keeps its part, so that it must yield "
            "the same on every rank"
        )

    def open(self, epoch: int, position: int) -> Iterator[Reading]:
        """Read an epoch, one step ahead, since only the dataset knows when it ends."""
        self._generator.manual_seed(hash_key(self.seed, epoch) >> 1)
        drawing = KeyedDraws(self.seed, epoch).active if self._reads_here else nullcontext
        steps = iter(self._loader_from(position))
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
        """Count what has come from a worker, and keep where its dataset stood."""
        self._received[mark.worker] += plan.advance
        if mark.snapshot is not None:
            self._stands[mark.worker] = Stand(self._received[mark.worker], mark.snapshot)

    def num_steps(self, _epoch: int) -> int:
        """The steps of a whole epoch, if the dataset has a length; as with torch, right without workers.

        Raises:
            TypeError: The dataset has no length.
        """
        num_samples = len(self._dataset)  # pyright: ignore[reportArgumentType]
        stride = (self._collate.batch_size or 1) * self._collate.shard.count
        return num_samples // stride + (self._collate.even != "drop" and num_samples % stride > 0)

    def position_after(self, _epoch: int, position: int, num_steps: int) -> int:
        """The position when `num_steps` steps from `position` are done; exact without workers."""
        return position + num_steps * (self._collate.batch_size or 1) * self._collate.shard.count

    def identity(self) -> Mapping[str, Any]:
        """What a saved state must agree on."""
        return {"order": f"stream:{type(self._dataset).__name__}", "num_workers": self._num_workers}

    def extra_state(self, _epoch: int, position: int) -> Mapping[str, Any]:
        """The samples received from each worker, and where its dataset stood, if it tells."""
        found: dict[str, Any] = {}
        if not position:
            return found
        if self._num_workers > 1:
            found["received"] = list(self._received)
        if any(self._stands):
            found["stands"] = [None if stand is None else stand._asdict() for stand in self._stands]
        return found

    def take_up(self, _epoch: int, state: Mapping[str, Any]) -> None:
        """Go on where each worker stood."""
        self._received = list(state.get("received", [0] * self._num_workers))
        stands = state.get("stands", [None] * self._num_workers)
        self._stands = [None if stand is None else Stand(**stand) for stand in stands]

    def _loader_from(self, position: int) -> DataLoader[Any]:
        if position == 0:
            self._received = [0] * self._num_workers
            self._stands = [None] * self._num_workers
            return self._loader
        if self._num_workers == 1:
            self._received = [position]
        if sum(self._received) != position:
            raise RuntimeError(
                f"position {position} of a stream read by {self._num_workers} workers cannot be found without "
                "reading: batches can be skipped with num_workers=0 or 1, and a saved state can be loaded"
            )
        known = sum(stand.received for stand in self._stands if stand is not None)
        logger.warning(
            "going on at sample %d of a stream: %s is read and dropped %s, on each rank that reads",
            position,
            type(self._dataset).__name__,
            f"from sample {known} on, where its own state ends" if known else "up to there",
        )
        return self._build(ResumedStream(self._dataset, tuple(self._received), tuple(self._stands)))
