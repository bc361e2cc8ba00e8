"""Which part of the data is this process's: two integers, wherever they come from."""

from dataclasses import dataclass

from drivetrain_data.errors import DataError


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several equal readers of a dataset.

    Attributes:
        index: This reader, from 0.
        count: The number of readers.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise DataError(f"Shard({self.index}, {self.count}): the count must be at least 1")
        if not 0 <= self.index < self.count:
            raise DataError(
                f"Shard({self.index}, {self.count}): the index must lie between 0 and {self.count - 1}"
            )
