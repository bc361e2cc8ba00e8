"""The text of a script or notebook, parsed, with the way back to its lines."""

import ast
import io
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path

from drivetrain_lint.reading.notebooks import CellLine, read_notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A file that cannot be checked, and the place of its fault; the reason ends a sentence about the file."""

    path: str
    line: int
    column: int
    reason: str
    source_line: str = ""
    cell: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed file; of a notebook, `text` is its code cells joined, and `cells` the cell and line of each line."""

    path: str
    text: str
    tree: ast.Module
    lines: tuple[str, ...]
    cells: tuple[CellLine, ...] | None = None

    def place(self, line: int) -> tuple[int | None, int]:
        """Return the cell, if any, and the line that the user sees, for a line of the text."""
        if self.cells is None or not 1 <= line <= len(self.cells):
            return None, line
        found = self.cells[line - 1]
        return found.cell, found.line


def read_document(path: Path, *, shown: str) -> Document | Unreadable:
    """Read and parse a script or a notebook, whose path the user knows as `shown`."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        return Unreadable(path=shown, line=1, column=1, reason=f"cannot be read: {error.strerror or error}")
    if path.suffix == ".ipynb":
        notebook = read_notebook(raw)
        if isinstance(notebook, str):
            return Unreadable(path=shown, line=1, column=1, reason=notebook)
        return parse_document(notebook.text, shown=shown, cells=notebook.lines)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = io.TextIOWrapper(io.BytesIO(raw), encoding).read()
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        return Unreadable(path=shown, line=1, column=1, reason=f"is no text in a known encoding: {error}")
    return parse_document(text, shown=shown)


def parse_document(
    text: str, *, shown: str, cells: tuple[CellLine, ...] | None = None
) -> Document | Unreadable:
    """Parse Python source, or the joined cells of a notebook."""
    lines = tuple(text.splitlines())
    try:
        with warnings.catch_warnings():
            # Of what is read here nothing runs: a warning about its strings is for those who run it.
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        line = min(max(error.lineno or 1, 1), max(len(lines), 1))
        cell, number = (cells[line - 1].cell, cells[line - 1].line) if cells else (None, line)
        return Unreadable(
            path=shown,
            line=number,
            column=max(error.offset or 1, 1),
            reason=f"does not parse: {error.msg}",
            source_line=lines[line - 1] if lines else "",
            cell=cell,
        )
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; code nested too deeply
        reason = str(error) or "it is nested too deeply"
        return Unreadable(path=shown, line=1, column=1, reason=f"does not parse: {reason}")
    return Document(path=shown, text=text, tree=tree, lines=lines, cells=cells)
