"""Where a sharded loader's batches come from: the protocol, and map-style datasets.

Call order, on every rank: `begin` once an epoch, then one batch after the other from what it returns. Every rank gets
equally many.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from drivetrain_data.errors import DataError, ResumeError
from drivetrain_data.order import Order, OrderSource, drawn, epoch_seed
from drivetrain_data.partition import BatchPlan, Partition, Slice
from drivetrain_data.permutation import VERSION
from drivetrain_data.settings import Even
from drivetrain_data.shard import Shard

_POSITIONS_AT_ONCE = 8192  # one position of a permutation costs as much as a thousand


class Item(NamedTuple):
    """A batch on its way to the user.

    Attributes:
        batch: What the loader's collate_fn made.
        plan: What every rank knows of it.
        consumed: Units of the epoch consumed once it is used (samples, or batches of a batch sampler).
    """

    batch: Any
    plan: BatchPlan
    consumed: int


class Source(Protocol):
    """A dataset read by several shards."""

    description: str
    batch_size: int | None
    total_batch_size: int | None

    def begin(self, epoch: int, start: int) -> Iterator[Item]:
        """Read an epoch from `start` units on."""
        ...

    def num_batches(self, start: int) -> int:
        """Batches of this shard from `start` units on.

        Raises:
            TypeError: The dataset has no length.
        """
        ...

    def units_of(self, batches: int) -> int:
        """Units that so many of this shard's batches stand for, from an epoch's beginning."""
        ...

    def fingerprint(self) -> Mapping[str, Any]:
        """What a saved position must fit: the length, and what else the order depends on."""
        ...


class _Indices:
    """The batch sampler that torch's DataLoader draws from: lists of samples, read off the epoch at hand."""

    def __init__(self) -> None:
        self.batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.batches


def rebuilt(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A loader like `loader`, with other sampling: torch does the fetching, the workers and the collating."""
    kept = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "prefetch_factor",
            "persistent_workers",
            "in_order",
        )
        if hasattr(loader, name)  # in_order came with torch 2.6
    }
    return DataLoader(**{"dataset": loader.dataset, **kept, "generator": torch.Generator(), **changed})


def begin_workers(loader: DataLoader[Any], seed: int, epoch: int, shard: Shard) -> None:
    """Seed what the workers draw in an epoch: another stream for each shard, the same at every run."""
    assert isinstance(loader.generator, torch.Generator)
    loader.generator.manual_seed(epoch_seed(seed, epoch, 1 + shard.index))


class MapSource:
    """A map-style dataset, read in an order that no number of ranks changes.

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
        self._shard = shard
        self._seed = seed
        self._even: Even = "drop" if loader.drop_last and loader.batch_size is not None else even
        self.batch_size = _per_shard(loader.batch_size, shard, split_batches)
        self.total_batch_size = self.batch_size * shard.count
        self._length = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        self._order = OrderSource(loader.sampler, length=self._length, seed=seed)
        self.description = self._order.description
        self._sampler = _Indices()
        self._unbatched = loader.batch_size is None
        how = (
            {"batch_size": None, "sampler": self._sampler}
            if self._unbatched
            else {"batch_sampler": self._sampler}
        )
        self._loader = rebuilt(loader, **how)

    def begin(self, epoch: int, start: int) -> Iterator[Item]:
        """Read an epoch from position `start` on."""
        order = self._order.epoch(epoch)
        partition = self._partition(order.length, start)
        index, size = self._shard.index, self.batch_size
        self._sampler.batches = self._batches(partition, order)
        begin_workers(self._loader, self._seed, epoch, self._shard)
        counts = None if self._unbatched else (size,) * self._shard.count
        full = BatchPlan(index=index, sizes=counts, real=(size,) * self._shard.count, is_last=False)
        last, step = partition.num_batches - 1, partition.global_batch
        consumed = start
        for batch, data in enumerate(self._loader):
            if batch != last:
                consumed += step
                yield Item(data, full, consumed)
            else:
                yield Item(data, self._plan(partition.slices(batch)), partition.consumed(batch + 1))

    def num_batches(self, start: int) -> int:
        """Batches from position `start` on."""
        length = self._order.length
        if length is None:
            raise TypeError(f"{self.description}: the sampler has no length")
        return self._partition(length, start).num_batches

    def units_of(self, batches: int) -> int:
        """Positions that so many batches take."""
        return batches * self.total_batch_size

    def fingerprint(self) -> Mapping[str, Any]:
        """The length and the order."""
        return {
            "kind": "samples",
            "length": self._length,
            "order": self.description,
            "order_version": VERSION,
        }

    def _partition(self, length: int, start: int) -> Partition:
        return Partition(
            length=length, shards=self._shard.count, batch_size=self.batch_size, even=self._even, start=start
        )

    def _batches(self, partition: Partition, order: Order) -> Iterator[Any]:
        step, mine = partition.global_batch, self._shard.index * self.batch_size
        within = np.arange(self.batch_size, dtype=np.int64)
        last = partition.num_batches - 1
        at_once = max(1, _POSITIONS_AT_ONCE // self.batch_size)
        for first in range(0, last, at_once):
            starts = np.arange(first, min(first + at_once, last), dtype=np.int64) * step + (
                partition.start + mine
            )
            found: list[list[int]] = order.at(starts[:, None] + within).tolist()
            yield from (samples[0] for samples in found) if self._unbatched else found
        if last >= 0:
            part = partition.slices(last)[self._shard.index]
            positions = np.arange(part.start, part.start + part.size, dtype=np.int64) % order.length
            samples = order.at(positions).tolist()
            yield samples[0] if self._unbatched else samples

    def _plan(self, slices: Sequence[Slice]) -> BatchPlan:
        return BatchPlan(
            index=self._shard.index,
            sizes=None if self._unbatched else tuple(part.size for part in slices),
            real=tuple(part.real for part in slices),
            is_last=True,
        )


class BatchSamplerSource:
    """A map-style dataset with a batch sampler of the user's own: whole batches go to the shards in turn.

    With `split_batches` each batch is cut into the shards' parts instead.
    """

    def __init__(
        self, loader: DataLoader[Any], shard: Shard, *, even: Even, split_batches: bool, seed: int
    ) -> None:
        self._shard = shard
        self._seed = seed
        self._even = even
        self._split = split_batches
        assert loader.batch_sampler is not None
        self._batch_sampler = loader.batch_sampler
        self._length = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        self.batch_size = self.total_batch_size = None
        self.description = (
            f"batches of {type(loader.batch_sampler).__name__}, drawn under seed {seed} on every rank"
        )
        self._sampler = _Indices()
        self._loader = rebuilt(loader, batch_sampler=self._sampler)

    def begin(self, epoch: int, start: int) -> Iterator[Item]:
        """Read an epoch from batch `start` on."""
        drawn_batches = [list(batch) for batch in drawn(self._batch_sampler, self._seed, epoch)]
        rounds = self._rounds(drawn_batches[start:])
        self._check(drawn_batches)
        self._sampler.batches = (parts[self._shard.index][0] for parts in rounds)
        begin_workers(self._loader, self._seed, epoch, self._shard)
        each = 1 if self._split else self._shard.count
        for i, data in enumerate(self._loader):
            plan = BatchPlan(
                index=self._shard.index,
                sizes=tuple(len(samples) for samples, _ in rounds[i]),
                real=tuple(real for _, real in rounds[i]),
                is_last=i + 1 == len(rounds),
            )
            yield Item(data, plan, min(start + (i + 1) * each, len(drawn_batches)))

    def num_batches(self, start: int) -> int:
        """Batches of this shard from the sampler's batch `start` on."""
        left = max(0, len(self._batch_sampler) - start)  # pyright: ignore[reportArgumentType]
        if self._split:
            return left
        return left // self._shard.count if self._even == "drop" else -(-left // self._shard.count)

    def units_of(self, batches: int) -> int:
        """The sampler's batches that so many of this shard's stand for."""
        return batches * (1 if self._split else self._shard.count)

    def fingerprint(self) -> Mapping[str, Any]:
        """The length and the sampler; a position counts its batches."""
        return {
            "kind": "batches",
            "length": self._length,
            "order": self.description,
            "order_version": VERSION,
        }

    def _rounds(self, batches: list[list[Any]]) -> list[list[tuple[list[Any], int]]]:
        """For each step, what every shard is handed, and how many samples of it are its own."""
        count = self._shard.count
        rounds: list[list[tuple[list[Any], int]]] = []
        if self._split:
            for batch in batches:
                each, more = divmod(len(batch), count)
                cuts = [r * each + min(r, more) for r in range(count + 1)]
                parts = [batch[start:stop] for start, stop in pairwise(cuts)]
                rounds.append([(part or batch[:1], len(part)) for part in parts])
            return rounds
        for i in range(0, len(batches), count):
            given = [(batch, len(batch)) for batch in batches[i : i + count]]
            if len(given) < count and self._even == "drop":
                break
            for r in range(len(given), count):
                repeated = rounds[-1][r][0] if rounds else batches[0]
                given.append((repeated, 0))
            rounds.append(given)
        return rounds

    def _check(self, batches: list[list[Any]]) -> None:
        for number, batch in enumerate(batches):
            if any(isinstance(s, int) and not -self._length <= s < self._length for s in batch):
                raise DataError(
                    f"{type(self._batch_sampler).__name__} yields {batch} as batch {number}: the dataset has "
                    f"{self._length} samples, 0 to {self._length - 1}"
                )


def check_fingerprint(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a position that was saved of other data.

    Raises:
        ResumeError: A field differs; the message gives both values.
    """
    for name, value in own.items():
        if saved.get(name) != value:
            raise ResumeError(
                f"the saved position is of other data: {name} was {saved.get(name)!r}, and is {value!r} now; resume "
                "with the same dataset, sampler and seed, or begin the epoch anew with set_epoch"
            )


def _per_shard(batch_size: int | None, shard: Shard, split_batches: bool) -> int:
    if batch_size is None:
        return 1
    if not split_batches:
        return batch_size
    if batch_size % shard.count:
        raise DataError(
            f"split_batches=True: batch_size={batch_size} cannot be split among {shard.count} shards; make it a "
            f"multiple of {shard.count}"
        )
    return batch_size // shard.count
