"""Samplers for torch's DataLoader that yield one shard's batches and record the plan of each step."""

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
from drivetrain_data.settings import UnevenPolicy
from drivetrain_data.shard import Shard

_BLOCK = 8192  # the number of positions computed at once


class PermutationSampler(Sampler[int]):
    """A sampler that shuffles any dataset in constant memory, computing each index when it is requested.

    Args:
        num_samples: The length of the dataset.
        seed: The seed from which, with the epoch, every order is derived.
        epoch: The first epoch; `set_epoch` chooses another.
        block_size: The size of the runs of neighbouring samples to keep together, each shuffled within, for storage
            that is fastest to read in sequence; None shuffles all samples.

    Raises:
        ValueError: A number is not an integer, or out of range.
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
        """Choose the epoch of the next iteration. A sharded loader counts epochs itself and ignores this."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.seed)
        for start in range(0, self.num_samples, _BLOCK):
            yield from order.take(self.epoch, np.arange(start, min(start + _BLOCK, self.num_samples)))

    def order(self, seed: int) -> ShuffledOrder | BlockShuffledOrder:
        """Return the sampler's order with a given seed."""
        if self.block_size is None:
            return ShuffledOrder(self.num_samples, seed=seed)
        return BlockShuffledOrder(self.num_samples, self.block_size, seed=seed)


class StepSampler:
    """A base class of samplers that read for a shard and record a plan for each step.

    Args:
        shard: The shard whose plans to record.
        even: The treatment of an epoch's tail.
        reads_for_all: Whether to yield the batches of all shards in shard order, without repeats, instead of only
            this shard's.

    Attributes:
        epoch: The epoch that the next iteration yields.
        position: The position in the epoch at which the next iteration starts.
        plans: A queue with the plan of each step of the newest iteration; the loader pops plans from the left.
    """

    def __init__(self, shard: Shard, even: UnevenPolicy, *, reads_for_all: bool) -> None:
        self.shard = shard
        self.even: UnevenPolicy = even
        self.reads_for_all = reads_for_all
        self.epoch = 0
        self.position = 0
        self.plans: deque[BatchPlan] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        # Not a generator: each iteration must get its own queue before torch requests the first batch.
        self.plans = deque()
        return self.steps(self.plans)

    def __len__(self) -> int:
        return self.num_steps(self.epoch, self.position)

    def steps(self, plans: deque[BatchPlan]) -> Iterator[list[Any]]:
        """Yield batches of indices, and append each step's plan to `plans` before its first batch."""
        raise NotImplementedError

    def num_steps(self, epoch: int, position: int) -> int:
        """Return the number of steps of an epoch from a position on.

        Raises:
            TypeError: The number of steps cannot be known in advance.
        """
        raise NotImplementedError


class OrderSampler(StepSampler):
    """A sampler that cuts an order into batches by a partition.

    Args:
        order: The order of every epoch.
        batch_size: The number of samples in a batch on each shard.
        shard: The shard whose batches to yield.
        even: The treatment of an epoch's tail.
        reads_for_all: Whether to yield the batches of all shards.
        agree: A callback that checks, as an epoch starts, that all ranks drew the same samples.
    """

    def __init__(
        self,
        order: Order,
        batch_size: int,
        shard: Shard,
        even: UnevenPolicy,
        *,
        reads_for_all: bool = False,
        agree: Agree | None = None,
    ) -> None:
        super().__init__(shard, even, reads_for_all=reads_for_all)
        self.order = order
        self.batch_size = batch_size
        self._agree = agree

    def partition(self, epoch: int, position: int) -> Partition:
        """Return the rest of an epoch; shards keep to the order's blocks if their number divides that of shards."""
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
        """Return the number of steps of an epoch from a position on."""
        return self.partition(epoch, position).num_steps

    def steps(self, plans: deque[BatchPlan]) -> Iterator[list[Any]]:
        """Yield batches of indices: full steps, computed in blocks, then the tail."""
        epoch = self.epoch
        if isinstance(self.order, DrawnOrder):
            checksum = self.order.checksum(epoch)  # also draws the epoch, whose length the partition needs
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
    """A sampler of single indices of an order, for datasets that are read without batching (batch_size=None)."""

    def steps(self, plans: deque[BatchPlan]) -> Iterator[Any]:
        """Yield one index per step."""
        noted: deque[BatchPlan] = deque()
        newest = unsized = None
        for (item,) in super().steps(noted):
            if noted:
                plan = noted.popleft()
                if plan is not newest:
                    # An item may be a batch made by the dataset, so its number of samples is unknown.
                    newest, unsized = plan, replace(plan, sizes=None)
                assert unsized is not None
                plans.append(unsized)
            yield item
