"""Iterable datasets: every shard reads the stream and keeps its part of each global batch.

So every rank knows the tail without asking, and the order is the stream's own. A stream that is dear to read is
better dispatched: one rank reads it and sends the others their parts.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from drivetrain_data.errors import ResumeError
from drivetrain_data.partition import BatchPlan, Partition
from drivetrain_data.settings import Even
from drivetrain_data.shard import Shard
from drivetrain_data.source import Item, begin_workers, rebuilt


class StreamSource:
    """An iterable dataset as a source.

    Args:
        loader: The user's loader.
        shard: This reader.
        even: What becomes of the tail.
        split_batches: Whether the loader's batch size is that of all shards together.
        seed: The seed of the run.
    """

    def __init__(
        self, loader: DataLoader[Any], shard: Shard, *, even: Even, split_batches: bool, seed: int
    ) -> None:
        self._dataset = loader.dataset
        self._shard = shard
        self._seed = seed
        self._num_workers = loader.num_workers
        unbatched = loader.batch_size is None
        size = 1 if unbatched else loader.batch_size
        assert size is not None
        self.batch_size = size // shard.count if split_batches and not unbatched else size
        self.total_batch_size = self.batch_size * shard.count
        self.description = f"{type(loader.dataset).__name__}'s own, read by every rank"
        self._parts = _Parts(
            loader.dataset,
            shard,
            batch_size=self.batch_size,
            even="drop" if loader.drop_last and not unbatched else even,
            collate=_only if unbatched else loader.collate_fn,
        )
        self._unbatched = unbatched
        self._loader = rebuilt(loader, dataset=self._parts, batch_size=None, collate_fn=_as_is)

    def begin(self, epoch: int, start: int) -> Iterator[Item]:
        """Read an epoch; a start is reached by reading past what comes before it.

        Raises:
            ResumeError: Several workers read the stream, whose common position is not known.
        """
        if start and self._num_workers > 1:
            raise ResumeError(
                f"a stream read by {self._num_workers} workers has no single position to go on from; resume with "
                "num_workers of 0 or 1"
            )
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)
        self._parts.start = start
        begin_workers(self._loader, self._seed, epoch, self._shard)
        consumed = start
        upcoming = iter(self._loader)
        following = next(upcoming, None)
        while following is not None:
            data, sizes, real = following
            following = next(upcoming, None)
            consumed += sum(real)
            yield Item(data, self._plan(sizes, real, is_last=following is None), consumed)

    def num_batches(self, start: int) -> int:
        """Batches from sample `start` on, where the dataset has a length."""
        length = len(self._dataset)  # pyright: ignore[reportArgumentType]
        return Partition(
            length=length,
            shards=self._shard.count,
            batch_size=self.batch_size,
            even=self._parts.even,
            start=start,
        ).num_batches

    def units_of(self, batches: int) -> int:
        """Samples that so many batches take."""
        return batches * self.total_batch_size

    def fingerprint(self) -> Mapping[str, Any]:
        """The kind of position: samples of the stream."""
        return {"kind": "stream"}

    def _plan(self, sizes: tuple[int, ...], real: tuple[int, ...], *, is_last: bool) -> BatchPlan:
        return BatchPlan(
            index=self._shard.index, sizes=None if self._unbatched else sizes, real=real, is_last=is_last
        )


class _Parts(IterableDataset[tuple[Any, tuple[int, ...], tuple[int, ...]]]):
    """This shard's collated part of every global batch of a stream, with every shard's size and real samples."""

    def __init__(
        self, dataset: Any, shard: Shard, *, batch_size: int, even: Even, collate: Callable[[list[Any]], Any]
    ) -> None:
        self.even: Even = even
        self.start = 0
        self._dataset = dataset
        self._shard = shard
        self._batch_size = batch_size
        self._collate = collate

    def __iter__(self) -> Iterator[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
        samples = islice(iter(self._dataset), self.start, None)
        full = self._shard.count * self._batch_size
        first: list[Any] = []
        before: list[Any] = []
        while group := list(islice(samples, full)):
            first = first or group
            parts = self._cut(group, before, first)
            if parts is None:
                return
            mine, sizes, real = parts
            yield self._collate(mine), sizes, real
            before = group

    def _cut(
        self, group: list[Any], before: list[Any], first: list[Any]
    ) -> tuple[list[Any], tuple[int, ...], tuple[int, ...]] | None:
        """This shard's part of a group; None where an incomplete one is dropped."""
        count, size, r = self._shard.count, self._batch_size, self._shard.index
        if len(group) == count * size:
            return group[r * size : (r + 1) * size], (size,) * count, (size,) * count
        if self.even == "drop":
            return None
        if self.even == "pad":
            real = tuple(min(max(0, len(group) - i * size), size) for i in range(count))
            filled = [*group, *(first * (count * size))][: count * size]
            return filled[r * size : (r + 1) * size], (size,) * count, real
        each, more = divmod(len(group), count)
        real = tuple(each + (i < more) for i in range(count))
        sizes = tuple(n or (size if before else 1) for n in real)
        start = r * each + min(r, more)
        if real[r]:
            return group[start : start + real[r]], sizes, real
        return (before[r * size : (r + 1) * size] if before else first[:1]), sizes, real


def _only(samples: list[Any]) -> Any:
    (sample,) = samples
    return sample


def _as_is(item: Any) -> Any:
    return item
