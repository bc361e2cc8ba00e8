"""What every rank knows, without asking, about the batch just read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One step's batches on all shards.

    Attributes:
        real_counts: The samples of each shard that count, in shard order: no padding, no replay. None if unknown;
            where batches of another library do not tell their sizes, 1 for each shard that has one.
        sizes: The samples that each shard holds, repeats included. None if unknown.
        even: Whether all shards hold equally many samples as in any other step, and all of them count in training.
        is_last: Whether no batch follows in this epoch.
        replayed: Whether this shard has no sample of its own and repeats one, with weight 0, to keep in step.
        advance: How far the step moves the position in the epoch.
        guessed: Whether sizes were read off the batches, whose layout is not ours to know.
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
        """Whether what shards hold is just what counts, so that nothing is to be trimmed."""
        if self.sizes is None:
            return self.real_counts is None or 0 not in self.real_counts
        return self.real_counts == self.sizes

    @property
    def equal_sizes(self) -> bool:
        """Whether shards are known to hold equally many samples, so that a gather need not ask for shapes."""
        return not self.guessed and self.sizes is not None and len(set(self.sizes)) == 1

    def weight(self, shard: int) -> float:
        """The factor of a shard's mean loss that makes the mean over all shards that over the samples that count.

        It is 1 where the step is even, or samples are not known, and 0 for a shard that repeats a sample: where that
        loss can be NaN, replace it instead.

        Raises:
            ValueError: There is no such shard.
        """
        counts = self.real_counts
        if counts is not None and shard not in range(len(counts)):
            raise ValueError(f"shard={shard!r}: with {len(counts)} shards they are 0 to {len(counts) - 1}")
        if self.even or counts is None:
            return 1.0
        return counts[shard] * len(counts) / max(sum(counts), 1)

    def replays(self, shard: int) -> bool:
        """Whether a shard has no sample of its own and repeats one; `replayed` says it of this one."""
        return not self.even and self.real_counts is not None and self.real_counts[shard] == 0

    def kept(self, shard: int) -> slice:
        """The samples of a shard's batch that count.

        Raises:
            RuntimeError: It is not known.
        """
        if self.real_counts is None:
            raise RuntimeError("the loader does not know how many samples each shard holds")
        return slice(0, self.real_counts[shard])
