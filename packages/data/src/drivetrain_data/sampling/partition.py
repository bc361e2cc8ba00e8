"""Pure index arithmetic: which positions of an epoch's order each shard reads in each step.

The order is cut into global batches of `num_shards * batch_size` positions, and each of these into one batch a
shard, in shard order. What was read is thus a prefix of the order, and the rest can be cut anew for any number of
shards. Where shards keep to blocks of the data, the order goes round the blocks, so that it is a prefix all the same.
Nothing here depends on the dataset: a laptop can lay out 10**12 samples over 10,000 ranks.
"""

from dataclasses import dataclass

import numpy as np

from drivetrain_data.randomness.permutation import Positions
from drivetrain_data.sampling.step_info import BatchPlan
from drivetrain_data.settings import Even


def balanced(total: int, parts: int, index: int) -> tuple[int, int]:
    """The bounds of one of `parts` contiguous slices of `total`, whose sizes differ by at most one."""
    size, larger = divmod(total, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def tail_counts(total: int, num_shards: int, batch_size: int, even: Even) -> tuple[int, ...]:
    """How many real samples each shard gets of a last global batch of `total`."""
    if even == "pad":
        return tuple(min(max(total - shard * batch_size, 0), batch_size) for shard in range(num_shards))
    size, larger = divmod(total, num_shards)
    return (size + 1,) * larger + (size,) * (num_shards - larger)


def step_plan(
    total: int, num_shards: int, batch_size: int, even: Even, *, shard: int, is_last: bool
) -> BatchPlan:
    """The plan of a step that has `total` new samples, up to `num_shards * batch_size`, for one shard."""
    counts = tail_counts(total, num_shards, batch_size, even)
    return counted_plan(counts, batch_size, even, shard=shard, is_last=is_last)


def counted_plan(
    counts: tuple[int, ...], batch_size: int, even: Even, *, shard: int, is_last: bool
) -> BatchPlan:
    """The plan of a step in which shards get `counts` new samples, each up to `batch_size`, for one shard."""
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
    """The rest of an epoch, cut for a number of shards.

    Attributes:
        start: The first position that is not read yet.
        stop: The number of positions in the epoch.
        num_shards: How many shards read.
        batch_size: Samples of a batch on each shard.
        even: What becomes of the tail. "uneven": contiguous slices, balanced over the shards; a shard that gets none
            repeats the epoch's last sample. "pad": filled up from the epoch's beginning. "drop": left out.
        num_blocks: Position p belongs to block p % num_blocks, and equally many neighbouring shards share a block:
            they read, repeat and pad from it alone. What all have read is a prefix of the order nevertheless.
    """

    start: int
    stop: int
    num_shards: int
    batch_size: int
    even: Even
    num_blocks: int = 1

    @property
    def stride(self) -> int:
        """The positions of a whole step."""
        return self.num_shards * self.batch_size

    @property
    def num_full_steps(self) -> int:
        """The steps in which every shard gets a whole batch of new samples."""
        return max(0, self.stop - self.start) // self.stride

    @property
    def tail(self) -> int:
        """The positions after the last full step that are read; fewer than a stride."""
        return 0 if self.even == "drop" else max(0, self.stop - self.start) % self.stride

    @property
    def num_steps(self) -> int:
        """The steps that every shard takes."""
        return self.num_full_steps + (self.tail > 0)

    def positions(self, step: int, shard: int) -> Positions:
        """What a shard reads in a step: its samples that count, then what it repeats.

        Raises:
            IndexError: There is no such step or shard.
        """
        if not (0 <= step < self.num_steps and 0 <= shard < self.num_shards):
            raise IndexError(
                f"step {step}, shard {shard} of {self.num_steps} steps, {self.num_shards} shards"
            )
        if step < self.num_full_steps:
            return self.full_steps(step, step + 1, shard)[0]
        block, member = divmod(shard, self._sharing)
        begin, end = self._number_in(block, self._tail_start), self._number_in(block, self.stop)
        if self.even == "pad":
            numbers = (
                np.arange(begin + member * self.batch_size, begin + (member + 1) * self.batch_size) % end
            )
        else:
            first, last = balanced(end - begin, self._sharing, member)
            numbers = np.arange(begin + first, begin + last) if first < last else np.array([end - 1])
        return numbers * self.num_blocks + block

    def full_steps(self, first: int, last: int, shard: int) -> Positions:
        """What a shard reads in the full steps [first, last), of shape (steps, batch_size)."""
        block, member = divmod(shard, self._sharing)
        begin = self._number_in(block, self.start) + member * self.batch_size
        starts = begin + np.arange(first, last) * (self._sharing * self.batch_size)
        return (starts[:, None] + np.arange(self.batch_size)) * self.num_blocks + block

    def plan(self, step: int, shard: int) -> BatchPlan:
        """What is known of a step."""
        counts = self._tail_counts() if step >= self.num_full_steps else (self.batch_size,) * self.num_shards
        is_last = step == self.num_steps - 1
        return counted_plan(counts, self.batch_size, self.even, shard=shard, is_last=is_last)

    def holders(self, step: int) -> int:
        """How many shards, counted from 0, read something of their own in a step, if there is one block."""
        if step < self.num_full_steps or self.even == "pad":
            return self.num_shards
        return min(self.tail, self.num_shards)

    def position_after(self, num_steps: int) -> int:
        """The first position that is not read after `num_steps` steps."""
        whole = self.start + num_steps * self.stride
        return whole if num_steps <= self.num_full_steps else self.stop

    @property
    def _sharing(self) -> int:
        """The shards that share a block."""
        return self.num_shards // self.num_blocks

    @property
    def _tail_start(self) -> int:
        return self.start + self.num_full_steps * self.stride

    def _number_in(self, block: int, position: int) -> int:
        """How many positions below `position` belong to a block."""
        return max(0, -(-(position - block) // self.num_blocks))

    def _tail_counts(self) -> tuple[int, ...]:
        counts: list[int] = []
        for block in range(self.num_blocks):
            total = self._number_in(block, self.stop) - self._number_in(block, self._tail_start)
            counts += tail_counts(total, self._sharing, self.batch_size, self.even)
        return tuple(counts)
