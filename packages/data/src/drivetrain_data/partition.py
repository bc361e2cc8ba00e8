"""Who gets which positions of the global order: index arithmetic alone, the same on every rank.

An epoch is a row of positions. Global batch g takes the next `shards * batch_size` of them, and shard r the r-th part
of those: so what is consumed is a prefix of the order, and concatenating the shards of each global batch gives the
order back. Only the last global batch may be short, and `Even` says what becomes of it.
"""

from dataclasses import dataclass

from drivetrain_data.settings import Even


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What every rank knows of a batch without asking the others.

    Attributes:
        index: This rank's shard.
        sizes: How many samples each shard was handed; None where items have no size known to the loader.
        real: How many of each shard's samples are its own, from the front; the rest repeat others'.
        is_last: Whether the epoch ends with this batch.
    """

    index: int
    sizes: tuple[int, ...] | None
    real: tuple[int, ...]
    is_last: bool

    @property
    def even(self) -> bool:
        """Whether every shard holds equally many samples, all of them its own."""
        return (
            self.real[0] > 0
            and self.real.count(self.real[0]) == len(self.real)
            and self.sizes in (None, self.real)
        )

    @property
    def replayed(self) -> bool:
        """Whether this rank holds only what others have, or what it had before."""
        return self.real[self.index] == 0

    @property
    def real_counts(self) -> tuple[int, ...] | None:
        """The samples that are each shard's own; None where items have no size known to the loader."""
        return None if self.sizes is None else self.real


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Positions [start, start + size) of the order, the first `real` of which are the shard's own."""

    start: int
    size: int
    real: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """An epoch's positions among shards.

    Attributes:
        length: Positions in the epoch.
        shards: Number of shards.
        batch_size: Samples of one shard's batch.
        even: What becomes of an incomplete last global batch.
        start: Positions consumed before this epoch was taken up, at another number of shards perhaps.
    """

    length: int
    shards: int
    batch_size: int
    even: Even
    start: int = 0

    @property
    def global_batch(self) -> int:
        """Positions of a full global batch."""
        return self.shards * self.batch_size

    @property
    def num_batches(self) -> int:
        """Global batches still to come."""
        full, tail = divmod(max(0, self.length - self.start), self.global_batch)
        return full + (tail > 0 and self.even != "drop")

    def consumed(self, batches: int) -> int:
        """Positions consumed after so many batches, those before `start` included."""
        if batches == self.num_batches:
            return self.length
        return self.start + batches * self.global_batch

    def slices(self, batch: int) -> list[Slice]:
        """What each shard gets of a global batch.

        A tail is cut into parts whose sizes differ by one at most, so that a shard goes empty only where there are
        fewer samples than shards.
        """
        start = self.start + batch * self.global_batch
        left = self.length - start
        if left >= self.global_batch:
            size = self.batch_size
            return [Slice(start=start + r * size, size=size, real=size) for r in range(self.shards)]
        if self.even == "pad":
            return [self._padded(start + r * self.batch_size) for r in range(self.shards)]
        each, more = divmod(left, self.shards)
        found: list[Slice] = []
        for r in range(self.shards):
            size = each + (r < more)
            found.append(Slice(start=start, size=size, real=size) if size else self._replayed(batch, r))
            start += size
        return found

    def _replayed(self, batch: int, shard: int) -> Slice:
        """What a shard without samples is handed: its last batch again, or the first sample if it had none."""
        if batch == 0:
            return Slice(start=0, size=1, real=0)
        start = self.start + (batch - 1) * self.global_batch + shard * self.batch_size
        return Slice(start=start, size=self.batch_size, real=0)

    def _padded(self, start: int) -> Slice:
        return Slice(
            start=start, size=self.batch_size, real=min(max(0, self.length - start), self.batch_size)
        )
