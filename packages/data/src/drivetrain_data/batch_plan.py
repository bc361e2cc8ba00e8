"""What every rank knows, without asking, about the batch just read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One step's batches on all shards.

    Attributes:
        real_counts: The samples of each shard that count, in shard order: no padding, no replay. None if unknown.
        sizes: The samples that each shard holds, repeats included. None if unknown.
        even: Whether all shards hold equally many samples as in any other step, and all of them count in training.
        is_last: Whether no batch follows in this epoch.
        replayed: Whether this shard has no sample of its own and repeats one, with weight 0, to keep in step.
        advance: How far the step moves the position in the epoch.
    """

    real_counts: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    even: bool
    is_last: bool
    replayed: bool
    advance: int

    @property
    def is_whole(self) -> bool:
        """Whether what shards hold is just what counts, so that nothing is to be trimmed."""
        if self.sizes is None:
            return self.real_counts is None or 0 not in self.real_counts
        return self.real_counts == self.sizes

    @property
    def equal_sizes(self) -> bool:
        """Whether shards are known to hold equally many samples, so that a gather need not ask for shapes."""
        return self.sizes is not None and len(set(self.sizes)) == 1

    def kept(self, shard: int) -> slice:
        """The samples of a shard's batch that count.

        Raises:
            RuntimeError: It is not known.
        """
        if self.real_counts is None:
            raise RuntimeError("the loader does not know how many samples each shard holds")
        return slice(0, self.real_counts[shard])
