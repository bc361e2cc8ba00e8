"""Samplers for torch's DataLoader that yield one shard's batches and record the plan of each step."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from drivetrain_data.sampling.block_shuffle import BlockShuffledOrder
from drivetrain_data.sampling.order import Order, ShuffledOrder
from drivetrain_data.sampling.partition import Partition
from drivetrain_data.sampling.sampler_order import IndexOrder
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sampling.step_info import BatchPlan

_BLOCK = 8192  # the number of positions computed at once


class PermutationSampler(Sampler[int]):
    """A sampler that shuffles any dataset in constant memory; it computes an index when the index is requested.

    Args:
        num_samples: The length of the dataset.
        seed: The seed of every order, which is derived from seed and epoch.
        epoch: The first epoch; `set_epoch` chooses another.
        block_size: The size of the runs of neighbouring samples to keep together, for storage that is fastest to
            read in sequence. Each run is shuffled too. None shuffles all samples.

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


class StepSampler(ABC):
    """A base class of samplers that read for a shard and record a plan for each step.

    If this rank reads for all, the sampler yields the batches of all shards that have a batch, in shard order.
    The next iteration starts at `epoch` and `position`.
    """

    def __init__(self, order: Order, sharding: DataSharding, *, stride: int, batch_size: int | None) -> None:
        self.order = order
        self.sharding = sharding
        self.stride = stride
        self.batch_size = batch_size
        self.epoch = 0
        self.position = 0
        self.plans: deque[BatchPlan] = deque()  # of the newest iteration; the loader pops from the left

    def __iter__(self) -> Iterator[list[Any]]:
        # Not a generator: each iteration must get its own queue before torch requests the first batch.
        self.plans = deque()
        return self.steps(self.plans)

    @abstractmethod
    def steps(self, plans: deque[BatchPlan]) -> Iterator[list[Any]]:
        """Yield batches of indices, and append each step's plan to `plans` before its first batch."""


class OrderSampler(StepSampler):
    """A sampler that cuts an order of samples into batches by a partition."""

    order: IndexOrder

    def __init__(self, order: IndexOrder, batch_size: int, sharding: DataSharding) -> None:
        super().__init__(order, sharding, stride=batch_size * sharding.shard.count, batch_size=batch_size)
        self._size = batch_size

    def _plan(self, partition: Partition, step: int) -> BatchPlan:
        return partition.plan(step, self.sharding.shard.index)

    def steps(self, plans: deque[BatchPlan]) -> Iterator[Any]:
        """Yield batches of indices: full steps, computed in blocks, then the tail."""
        epoch, size, count = self.epoch, self._size, self.sharding.shard.count
        self.order.begin(epoch)  # before the partition, which needs the length of what is drawn
        num_blocks = self.order.num_blocks(epoch)
        partition = Partition(
            start=self.position,
            stop=self.order.length(epoch),
            num_shards=count,
            batch_size=size,
            even=self.sharding.even,
            # Shards keep to the order's blocks if the number of blocks divides that of shards.
            num_blocks=num_blocks if count % num_blocks == 0 else 1,
        )
        num_full, last = partition.num_full_steps, partition.num_steps - 1
        full = self._plan(partition, 0) if partition.num_steps > 1 else None
        readers = self.sharding.readers((size,) * count)
        width = len(readers) * size
        block = max(1, _BLOCK // width)
        for first in range(0, num_full, block):
            end = min(first + block, num_full)
            positions = np.stack([partition.full_steps(first, end, reader) for reader in readers], axis=1)
            taken = self.order.take(epoch, positions.ravel())
            for number in range(end - first):
                is_last = first + number == last
                plans.append(self._plan(partition, last) if is_last or full is None else full)
                for begin in range(number * width, (number + 1) * width, size):
                    yield taken[begin : begin + size]
        if partition.tail:
            plan = self._plan(partition, last)
            plans.append(plan)
            assert plan.real_counts is not None
            for reader in self.sharding.readers(plan.real_counts):
                yield self.order.take(epoch, partition.positions(last, reader))


class ItemSampler(OrderSampler):
    """A sampler of single indices of an order, for datasets that are read without batching (batch_size=None)."""

    def __init__(self, order: IndexOrder, sharding: DataSharding) -> None:
        super().__init__(order, 1, sharding)
        self.batch_size = None

    def _plan(self, partition: Partition, step: int) -> BatchPlan:
        # An item may be a batch made by the dataset, so its number of samples is unknown.
        return replace(super()._plan(partition, step), sizes=None)

    def steps(self, plans: deque[BatchPlan]) -> Iterator[Any]:
        """Yield one index per step."""
        for (item,) in super().steps(plans):
            yield item
