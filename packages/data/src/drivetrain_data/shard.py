"""Which part of the data a process takes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal takers of the data.

    Attributes:
        index: Which one this is, from 0. Ranks that must see the same batches, as in tensor parallelism, share one.
        count: How many there are.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        """Check both.

        Raises:
            TypeError: One is no integer.
            ValueError: There are no takers, or this is none of them.
        """
        for name, value in (("index", self.index), ("count", self.count)):
            if type(value) is not int:
                raise TypeError(f"{name}={value!r}: must be an integer, such as a rank or a number of ranks")
        if self.count < 1:
            raise ValueError(f"count={self.count!r}: data is divided among at least 1 shard")
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"index={self.index!r}: with count={self.count} the shards are 0 to {self.count - 1}"
            )
