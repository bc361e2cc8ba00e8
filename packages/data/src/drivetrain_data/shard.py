"""The part of the data that a process reads."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of the data: part `index`, counted from 0, of `count` equal parts.

    Ranks that must see the same batches, as in tensor parallelism, have the same index.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless `index` and `count` are integers and 0 <= `index` < `count`."""
        for name, value in (("index", self.index), ("count", self.count)):
            if type(value) is not int:
                raise TypeError(f"{name}={value!r}: must be an integer, such as a rank or a number of ranks")
        if self.count < 1:
            raise ValueError(f"count={self.count!r}: data is divided among at least 1 shard")
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"index={self.index!r}: with count={self.count} the shards are 0 to {self.count - 1}"
            )
