"""The newest samples, in memory that is allocated once."""

from array import array
from collections.abc import Iterator, Sequence


class SampleRing:
    """A ring of rows of numbers; a new row takes the place of the oldest."""

    def __init__(self, num_columns: int, num_rows: int) -> None:
        if num_columns < 1 or num_rows < 1:
            raise ValueError(f"a ring of {num_rows} rows of {num_columns} numbers: both must be at least 1")
        self._num_columns, self._num_rows = num_columns, num_rows
        self._values = array("d", bytes(8 * num_columns * num_rows))
        self._count = 0  # of all rows that were ever added

    def __len__(self) -> int:
        return min(self._count, self._num_rows)

    def add(self, row: Sequence[float]) -> None:
        """Add a row."""
        if len(row) != self._num_columns:
            raise ValueError(f"a row of {len(row)} numbers: this ring has {self._num_columns} columns")
        start = (self._count % self._num_rows) * self._num_columns
        self._values[start : start + self._num_columns] = array("d", row)
        self._count += 1

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        """Yield the rows, oldest first."""
        for number in range(self._count - len(self), self._count):
            start = (number % self._num_rows) * self._num_columns
            yield tuple(self._values[start : start + self._num_columns])
