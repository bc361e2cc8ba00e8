"""Pure index arithmetic: which positions of an epoch's order each shard reads in each step.

The order is cut into global batches of `num_shards * batch_size` positions, and each of these into one batch a
shard, in shard order. What was read is thus a prefix of the order, and the rest can be cut anew for any number of
shards. Nothing here depends on the dataset: a laptop can lay out 10**12 samples over 10,000 ranks.
"""

from dataclasses import dataclass

from drivetrain_data.batch_plan import BatchPlan
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
    full = total == num_shards * batch_size
    sizes = (batch_size,) * num_shards if even == "pad" else tuple(max(count, 1) for count in counts)
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
    """

    start: int
    stop: int
    num_shards: int
    batch_size: int
    even: Even

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

    def bounds(self, step: int, shard: int) -> tuple[int, int]:
        """The positions [first, last) that a shard reads in a step. Padding lies beyond `stop`: take them modulo it.

        Raises:
            IndexError: There is no such step or shard.
        """
        if not (0 <= step < self.num_steps and 0 <= shard < self.num_shards):
            raise IndexError(
                f"step {step}, shard {shard} of {self.num_steps} steps, {self.num_shards} shards"
            )
        begin = self.start + step * self.stride
        if step < self.num_full_steps or self.even == "pad":
            return begin + shard * self.batch_size, begin + (shard + 1) * self.batch_size
        first, last = balanced(self.tail, self.num_shards, shard)
        if first == last:
            return self.stop - 1, self.stop
        return begin + first, begin + last

    def plan(self, step: int, shard: int) -> BatchPlan:
        """What is known of a step."""
        total = self.stride if step < self.num_full_steps else self.tail
        return step_plan(
            total,
            self.num_shards,
            self.batch_size,
            self.even,
            shard=shard,
            is_last=step == self.num_steps - 1,
        )

    def holders(self, step: int) -> int:
        """How many shards, counted from 0, read something of their own in a step."""
        if step < self.num_full_steps or self.even == "pad":
            return self.num_shards
        return min(self.tail, self.num_shards)

    def position_after(self, num_steps: int) -> int:
        """The first position that is not read after `num_steps` steps."""
        whole = self.start + num_steps * self.stride
        return whole if num_steps <= self.num_full_steps else self.stop
