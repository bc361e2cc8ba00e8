"""The plan of a step, which every rank knows without communication."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A plan of one step: the number of samples on every shard.

    Attributes:
        real_counts: The number of real samples of each shard, in shard order, without padding and replays. None if
            unknown. For an external loader whose batch sizes are unknown, 1 for each shard that has a batch.
        sizes: The number of samples that each shard holds, repeats included. None if unknown.
        even: Whether all shards hold equally many samples and all samples count in training, as in a full step.
        replayed: Whether this shard has no new sample and repeats a sample with weight 0, to keep in step.
        advance: The number of positions by which the step advances in the epoch.
        guessed: Whether the sizes were guessed from the batches of an external loader.
    """

    real_counts: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    even: bool
    is_last: bool
    replayed: bool
    advance: int
    guessed: bool = False

    @property
    def is_whole(self) -> bool:
        """True if all samples that the shards hold are real, so that nothing needs trimming."""
        if self.sizes is None:
            return self.real_counts is None or 0 not in self.real_counts
        return self.real_counts == self.sizes

    @property
    def equal_sizes(self) -> bool:
        """True if all shards are known to hold equally many samples, so that a gather need not exchange shapes."""
        return not self.guessed and self.sizes is not None and len(set(self.sizes)) == 1

    def padded_to(self, num_rows: int) -> "BatchPlan":
        """Return the plan of batches that are padded to `num_rows` each, with the real samples first."""
        return self if self.real_counts is None else replace(self, sizes=(num_rows,) * len(self.real_counts))

    def weight(self, shard: int) -> float:
        """Return the weight of a shard's mean loss that makes the mean over shards the mean over real samples.

        The weight is 1 if the step is even or its counts are unknown, and 0 for a shard that repeats a sample. If the
        loss of a repeated sample can be NaN, replace the loss instead, since 0 times NaN is NaN.
        """
        counts = self.real_counts
        if counts is not None and shard not in range(len(counts)):
            raise ValueError(f"shard={shard!r}: with {len(counts)} shards they are 0 to {len(counts) - 1}")
        if self.even or counts is None:
            return 1.0
        return counts[shard] * len(counts) / max(sum(counts), 1)

    def replays(self, shard: int) -> bool:
        """Return whether a shard has no new sample and repeats a sample; for this shard see `replayed`."""
        return not self.even and self.real_counts is not None and self.real_counts[shard] == 0

    def kept(self, shard: int) -> slice:
        """Return the slice with the real samples of a shard's batch; RuntimeError if their number is unknown."""
        if self.real_counts is None:
            raise RuntimeError("the loader does not know how many samples each shard holds")
        return slice(0, self.real_counts[shard])


def look_ahead(steps: Iterator[T]) -> Iterator[tuple[T, bool]]:
    """Yield each step and whether it is the last; the next step is read before a step is yielded."""
    end = object()
    following = next(steps, end)
    while following is not end:
        step, following = following, next(steps, end)
        yield step, following is end  # pyright: ignore[reportReturnType]
