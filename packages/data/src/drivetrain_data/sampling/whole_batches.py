"""A user's batches, distributed whole to the shards, or each batch split among the shards."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from drivetrain_data.sampling.partition import balanced
from drivetrain_data.sampling.sampler_order import DrawnBatches
from drivetrain_data.sampling.samplers import StepSampler
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sampling.step_info import BatchPlan, look_ahead
from drivetrain_data.settings import UnevenPolicy

Batch = TypeVar("Batch")


def cut_into_steps(batches: Iterator[Batch], length: int, even: UnevenPolicy) -> Iterator[list[Batch]]:
    """Yield the `length` batches of each step; a last step with fewer batches may be dropped."""
    while step := list(islice(batches, length)):
        if len(step) == length or even != "drop":
            yield step
        if len(step) < length:
            return  # some loaders begin anew when they are asked again after their end


def distribute(step: list[Batch], first: Sequence[Batch], sharding: DataSharding) -> list[Batch]:
    """Return the batch of each shard: the step's batches, then repeats; "pad" repeats the first step's batches."""
    num_missing = sharding.shard.count - len(step)
    if sharding.even == "pad":
        return step + [first[number % len(first)] for number in range(num_missing)]
    return step + step[-1:] * num_missing


def plan_of_batches(
    counts: Sequence[int],
    sizes: Sequence[int] | None,
    sharding: DataSharding,
    *,
    advance: int,
    is_last: bool,
    guessed: bool = False,
) -> BatchPlan:
    """Return a shard's plan of a step of a user's batches, which may differ in size.

    `counts` has the number of real samples of each shard; `sizes` the number of all its samples, None if unknown.
    """
    are_equal = sizes is None or len(set(sizes)) == 1
    plan = BatchPlan(
        real_counts=tuple(counts),
        sizes=None if sizes is None else tuple(sizes),
        even=are_equal and (sharding.even == "pad" or 0 not in counts),
        is_last=is_last,
        replayed=False,
        advance=advance,
        guessed=guessed,
    )
    return replace(plan, replayed=plan.replays(sharding.shard.index))


class WholeBatchSampler(StepSampler):
    """A sampler of a user's batches, distributed whole in turn, or each batch split among the shards."""

    order: DrawnBatches

    def __init__(self, order: DrawnBatches, sharding: DataSharding) -> None:
        super().__init__(
            order, sharding, stride=1 if sharding.split else sharding.shard.count, batch_size=None
        )

    def steps(self, plans: deque[BatchPlan]) -> Iterator[list[Any]]:
        """Yield batches of indices."""
        sharding = self.sharding
        batches = self.order.read(self.epoch, self.position)
        first: list[list[Any]] = []
        for step, is_last in look_ahead(cut_into_steps(batches, self.stride, sharding.even)):
            first = first or step
            if sharding.split:
                count, (batch,) = sharding.shard.count, step
                bounds = [balanced(len(batch), count, shard) for shard in range(count)]
                # The last sample again for none.
                held = [batch[begin:end] or batch[-1:] for begin, end in bounds]
                counts = [end - begin for begin, end in bounds]
            else:
                held = distribute(step, first, sharding)
                counts = [len(batch) for batch in step] + [0] * (len(held) - len(step))
            sizes = [len(batch) for batch in held]
            plans.append(plan_of_batches(counts, sizes, sharding, advance=len(step), is_last=is_last))
            for shard in sharding.readers(counts):
                yield held[shard]
