"""Samplers for torch's DataLoader that give one shard's batches, and note for each step what all shards do."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from drivetrain_data.collective_errors import Agree
from drivetrain_data.sampling.block_shuffle import BlockOrder, BlockShuffledOrder
from drivetrain_data.sampling.order import Order, ShuffledOrder
from drivetrain_data.sampling.partition import Partition
from drivetrain_data.sampling.sampler_order import DrawnOrder
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.settings import Even
from drivetrain_data.shard import Shard

_BLOCK = 8192  # positions computed at once


class PermutationSampler(Sampler[int]):
    """Shuffles any dataset in no memory and no time: an index is computed when it is asked for.

    Args:
        num_samples: The dataset's length.
        seed: The seed of all epochs.
        epoch: The first epoch; `set_epoch` chooses another.
        block_size: Keep runs of so many neighbouring samples together, each shuffled within, for storage that is read
            best in sequence; None shuffles all.

    Raises:
        ValueError: A number is no whole one, or out of range.
    """

    def __init__(
        self, num_samples: int, *, seed: int = 0, epoch: int = 0, block_size: int | None = None
    ) -> None:
        for name, given in (("num_samples", num_samples), ("seed", seed), ("epoch", epoch)):
            if not hasattr(given, "__index__") or given < 0:
                raise ValueError(f"{name}={given!r}: must be a whole number, 0 or more")
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = epoch
        self.block_size = block_size
        self.order(seed)  # checks them

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch. A loader that is sharded counts its epochs itself, and does not hear it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.seed)
        for start in range(0, self.num_samples, _BLOCK):
            yield from order.take(self.epoch, np.arange(start, min(start + _BLOCK, self.num_samples)))

    def order(self, seed: int) -> ShuffledOrder | BlockShuffledOrder:
        """The order that it gives, with a seed."""
        if self.block_size is None:
            return ShuffledOrder(self.num_samples, seed=seed)
        return BlockShuffledOrder(self.num_samples, self.block_size, seed=seed)


class StepSampler:
    """What the samplers here share: where they stand, for whom they read, and the plans they leave.

    Args:
        shard: Whose plans are made.
        even: What becomes of a tail.
        reads_for_all: Give every shard's batches in shard order, without repeats, instead of this shard's.

    Attributes:
        epoch: The epoch that the next iteration gives.
        position: Where in it the next iteration starts.
        plans: One plan a step of the newest iteration, for the loader to take from the left.
    """

    def __init__(self, shard: Shard, even: Even, *, reads_for_all: bool) -> None:
        self.shard = shard
        self.even: Even = even
        self.reads_for_all = reads_for_all
        self.epoch = 0
        self.position = 0
        self.plans: deque[BatchPlan] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        # Not a generator itself: the iteration gets a queue of its own before torch asks for the first batch.
        self.plans = deque()
        return self.steps(self.plans)

    def __len__(self) -> int:
        return self.num_steps(self.epoch, self.position)

    def steps(self, plans: deque[BatchPlan]) -> Iterator[list[Any]]:
        """Give batches of indices, noting each step's plan before its first batch."""
        raise NotImplementedError

    def num_steps(self, epoch: int, position: int) -> int:
        """The steps of an epoch from a position on.

        Raises:
            TypeError: They cannot be known beforehand.
        """
        raise NotImplementedError


class OrderSampler(StepSampler):
    """Batches of an order, cut by a partition.

    Args:
        order: The order of every epoch.
        batch_size: Samples of a batch on each shard.
        shard: Whose batches are given.
        even: What becomes of the tail.
        reads_for_all: Give every shard's batches.
        agree: Told what an epoch was drawn by each time one begins, to hold it against that of the other ranks.
    """

    def __init__(
        self,
        order: Order,
        batch_size: int,
        shard: Shard,
        even: Even,
        *,
        reads_for_all: bool = False,
        agree: Agree | None = None,
    ) -> None:
        super().__init__(shard, even, reads_for_all=reads_for_all)
        self.order = order
        self.batch_size = batch_size
        self._agree = agree

    def partition(self, epoch: int, position: int) -> Partition:
        """The rest of an epoch; shards keep to the order's blocks where these are as many or a divisor."""
        num_blocks = self.order.num_blocks(epoch) if isinstance(self.order, BlockOrder) else 1
        return Partition(
            start=position,
            stop=self.order.length(epoch),
            num_shards=self.shard.count,
            batch_size=self.batch_size,
            even=self.even,
            num_blocks=num_blocks if self.shard.count % num_blocks == 0 else 1,
        )

    def num_steps(self, epoch: int, position: int) -> int:
        """The steps of an epoch from a position on."""
        return self.partition(epoch, position).num_steps

    def steps(self, plans: deque[BatchPlan]) -> Iterator[list[Any]]:
        """Give batches of indices: whole steps in blocks, then the tail."""
        epoch = self.epoch
        if isinstance(self.order, DrawnOrder):
            checksum = self.order.checksum(epoch)  # draws it, so that the partition knows how much that is
            if self._agree is not None:
                self._agree(type(self.order.sampler).__name__, checksum)
        partition = self.partition(epoch, self.position)
        readers = range(self.shard.count) if self.reads_for_all else [self.shard.index]
        num_full, size = partition.num_full_steps, self.batch_size
        full = partition.plan(0, self.shard.index) if partition.num_steps > 1 else None
        last = partition.num_steps - 1
        width = len(readers) * size
        block = max(1, _BLOCK // width)
        for first in range(0, num_full, block):
            end = min(first + block, num_full)
            positions = np.stack([partition.full_steps(first, end, reader) for reader in readers], axis=1)
            taken = self.order.take(epoch, positions.ravel())
            for number in range(end - first):
                is_last = first + number == last
                plans.append(partition.plan(last, self.shard.index) if is_last or full is None else full)
                for begin in range(number * width, (number + 1) * width, size):
                    yield taken[begin : begin + size]
        if partition.tail:
            plans.append(partition.plan(last, self.shard.index))
            for reader in range(partition.holders(last)) if self.reads_for_all else readers:
                yield self.order.take(epoch, partition.positions(last, reader))


class ItemSampler(OrderSampler):
    """Single indices of an order, for datasets that are read without batching (batch_size=None)."""

    def steps(self, plans: deque[BatchPlan]) -> Iterator[Any]:
        """Give an index a step."""
        noted: deque[BatchPlan] = deque()
        newest = unsized = None
        for (item,) in super().steps(noted):
            if noted:
                plan = noted.popleft()
                if plan is not newest:
                    # What an item holds is the dataset's business: how many samples is not known.
                    newest, unsized = plan, replace(plan, sizes=None)
                assert unsized is not None
                plans.append(unsized)
            yield item
