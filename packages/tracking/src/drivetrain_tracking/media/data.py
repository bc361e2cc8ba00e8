"""Tables, histograms and texts, whose content is in the log itself; and artifacts, which are files of any kind."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from drivetrain_tracking.errors import ValueNotLoggableError
from drivetrain_tracking.media.medium import Medium, as_array, media_library
from drivetrain_tracking.values.plain import plain_values
from drivetrain_tracking.values.records import StoredMedium


@dataclass(frozen=True, slots=True)
class Table(Medium):
    """A table of plain values.

    Args:
        columns: The names of the columns.
        rows: The rows, each with one value per column.
        caption: A line of text to show with it.

    Example:
        >>> Table(columns=["prompt", "answer"], rows=[["2 + 2", "4"]]).columns
        ['prompt', 'answer']
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    def store(self, stem: Path) -> StoredMedium:  # noqa: ARG002 - it stands in the log
        """Return the table as plain data; see `Medium.store`."""
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueNotLoggableError(
                    f"Table: row {number} has {len(row)} values for {len(self.columns)} columns"
                )
        data = plain_values({"columns": list(self.columns), "rows": [list(row) for row in self.rows]})
        return StoredMedium(kind="table", data=data, caption=self.caption)


@dataclass(frozen=True, slots=True)
class Histogram(Medium):
    """The distribution of numbers, as counts between edges.

    NaN and infinities are in no bin; their number is `num_nonfinite` of the data.

    Args:
        data: An array or tensor of any shape.
        num_bins: The number of bins, of equal width from the smallest to the largest finite number.
        caption: A line of text to show with it.
    """

    data: Any
    num_bins: int = 64
    caption: str = ""

    def store(self, stem: Path) -> StoredMedium:  # noqa: ARG002 - it stands in the log
        """Return the counts as plain data; see `Medium.store`."""
        if self.num_bins < 1:
            raise ValueNotLoggableError(f"Histogram(num_bins={self.num_bins!r}): must be at least 1")
        numpy = media_library("numpy")
        numbers = as_array(self.data, "Histogram").reshape(-1).astype(numpy.float64)
        finite = numbers[numpy.isfinite(numbers)]
        counts, edges = numpy.histogram(finite, bins=self.num_bins)
        data = {
            "edges": edges.tolist(),
            "counts": counts.tolist(),
            "num_nonfinite": int(numbers.size - finite.size),
        }
        return StoredMedium(kind="histogram", data=data, caption=self.caption)


@dataclass(frozen=True, slots=True)
class Text(Medium):
    """A text to show as a document, such as a generated sample; a plain string is a value.

    Args:
        text: The text, of any length.
        caption: A line of text to show with it.
    """

    text: str
    caption: str = ""

    def store(self, stem: Path) -> StoredMedium:  # noqa: ARG002 - it stands in the log
        """Return the text as plain data; see `Medium.store`."""
        if not isinstance(self.text, str):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
            raise ValueNotLoggableError(f"Text({type(self.text).__name__}): pass a string")
        return StoredMedium(kind="text", data=self.text, caption=self.caption)


@dataclass(frozen=True, slots=True)
class Artifact(Medium):
    """A file, or a folder as a ZIP archive, copied beside the log.

    Args:
        path: The file or folder.
        caption: A line of text to show with it.
    """

    path: str | PathLike[str]
    caption: str = ""

    def store(self, stem: Path) -> StoredMedium:
        """Copy the file, or archive the folder; see `Medium.store`."""
        source = Path(self.path)
        if source.is_dir():
            kept = Path(shutil.make_archive(str(stem), "zip", source))
        elif source.is_file():
            kept = stem.with_name(stem.name + source.suffix)
            shutil.copyfile(source, kept)
        else:
            raise ValueNotLoggableError(f"Artifact({str(source)!r}): there is no such file or folder")
        return StoredMedium(kind="artifact", path=kept, caption=self.caption)
