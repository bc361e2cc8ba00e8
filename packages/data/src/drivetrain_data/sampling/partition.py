"""Compute which positions of an epoch's order each shard reads in each step, by pure index arithmetic.

The order is cut into global batches of `num_shards * batch_size` positions, and each of these into one batch per
shard, in shard order. The positions read so far are thus a prefix of the order, and any number of shards can
partition the rest. If each shard reads its own block of the data, the order cycles through the blocks, which keeps
the prefix property. Nothing here depends on the dataset: a laptop can partition 10**12 samples over 10,000 ranks.
"""

from dataclasses import dataclass

import numpy as np

from drivetrain_data.randomness.permutation import Positions
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.settings import UnevenPolicy


def balanced(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return the bounds of slice `index` of `total`, cut into `parts` slices whose sizes differ by at most one."""
    size, larger = divmod(total, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def num_steps(num_positions: int, stride: int, even: UnevenPolicy) -> int:
    """Return the number of steps of `stride` positions in `num_positions`. A tail counts unless it is dropped."""
    full, tail = divmod(max(0, num_positions), stride)
    return full + (tail > 0 and even != "drop")


def tail_counts(total: int, num_shards: int, batch_size: int, even: UnevenPolicy) -> tuple[int, ...]:
    """Return the number of real samples of each shard in a last global batch of `total` samples."""
    if even == "pad":
        return tuple(min(max(total - shard * batch_size, 0), batch_size) for shard in range(num_shards))
    size, larger = divmod(total, num_shards)
    return (size + 1,) * larger + (size,) * (num_shards - larger)


def step_plan(
    total: int, num_shards: int, batch_size: int, even: UnevenPolicy, *, shard: int, is_last: bool
) -> BatchPlan:
    """Return one shard's plan of a step with `total` new samples, up to `num_shards * batch_size`."""
    counts = tail_counts(total, num_shards, batch_size, even)
    return counted_plan(counts, batch_size, even, shard=shard, is_last=is_last)


def counted_plan(
    counts: tuple[int, ...], batch_size: int, even: UnevenPolicy, *, shard: int, is_last: bool
) -> BatchPlan:
    """Return one shard's plan of a step in which the shards get `counts` new samples, each up to `batch_size`."""
    total = sum(counts)
    full = total == len(counts) * batch_size
    sizes = (batch_size,) * len(counts) if even == "pad" else tuple(max(count, 1) for count in counts)
    return BatchPlan(
        real_counts=counts,
        sizes=sizes,
        even=full or even == "pad",
        is_last=is_last,
        replayed=even != "pad" and counts[shard] == 0,
        advance=total,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The rest of an epoch, partitioned among a number of shards.

    Attributes:
        start: The first position that has not been read yet.
        stop: The number of positions in the epoch.
        even: The treatment of the tail. "uneven" splits it into contiguous slices, balanced over the shards; a shard
            without samples repeats the epoch's last sample. "pad" fills it from the epoch's start. "drop" drops it.
        num_blocks: The number of blocks. Position p belongs to block p % num_blocks, and equally many consecutive
            shards share a block: they read, repeat and pad only from it. The positions that all shards have read are
            still a prefix of the order.
    """

    start: int
    stop: int
    num_shards: int
    batch_size: int
    even: UnevenPolicy
    num_blocks: int = 1

    @property
    def stride(self) -> int:
        """The number of positions in a full step."""
        return self.num_shards * self.batch_size

    @property
    def num_full_steps(self) -> int:
        """The number of steps in which every shard gets a full batch of new samples."""
        return max(0, self.stop - self.start) // self.stride

    @property
    def tail(self) -> int:
        """The number of positions read after the last full step, less than `stride`."""
        return 0 if self.even == "drop" else max(0, self.stop - self.start) % self.stride

    @property
    def num_steps(self) -> int:
        """The number of steps that every shard takes."""
        return self.num_full_steps + (self.tail > 0)

    def positions(self, step: int, shard: int) -> Positions:
        """Return the positions that a shard reads in a step: its real samples, then its repeats."""
        if not (0 <= step < self.num_steps and 0 <= shard < self.num_shards):
            raise IndexError(
                f"step {step}, shard {shard} of {self.num_steps} steps, {self.num_shards} shards"
            )
        if step < self.num_full_steps:
            return self.full_steps(step, step + 1, shard)[0]
        block, member = divmod(shard, self._sharing)
        begin, end = self._number_in(block, self._tail_start), self._number_in(block, self.stop)
        if self.even == "pad":
            first = begin + member * self.batch_size
            numbers = np.arange(first, first + self.batch_size) % end
        else:
            first, last = balanced(end - begin, self._sharing, member)
            numbers = np.arange(begin + first, begin + last) if first < last else np.array([end - 1])
        return numbers * self.num_blocks + block

    def full_steps(self, first: int, last: int, shard: int) -> Positions:
        """Return the positions that a shard reads in the full steps [first, last), of shape (steps, batch_size)."""
        block, member = divmod(shard, self._sharing)
        begin = self._number_in(block, self.start) + member * self.batch_size
        starts = begin + np.arange(first, last) * (self._sharing * self.batch_size)
        return (starts[:, None] + np.arange(self.batch_size)) * self.num_blocks + block

    def plan(self, step: int, shard: int) -> BatchPlan:
        """Return a shard's plan of a step."""
        counts = (self.batch_size,) * self.num_shards
        if step >= self.num_full_steps:
            counts = ()
            for block in range(self.num_blocks):
                total = self._number_in(block, self.stop) - self._number_in(block, self._tail_start)
                counts += tail_counts(total, self._sharing, self.batch_size, self.even)
        is_last = step == self.num_steps - 1
        return counted_plan(counts, self.batch_size, self.even, shard=shard, is_last=is_last)

    @property
    def _sharing(self) -> int:
        """The number of shards that share a block."""
        return self.num_shards // self.num_blocks

    @property
    def _tail_start(self) -> int:
        return self.start + self.num_full_steps * self.stride

    def _number_in(self, block: int, position: int) -> int:
        """Return how many positions below `position` belong to a block."""
        return max(0, -(-(position - block) // self.num_blocks))
