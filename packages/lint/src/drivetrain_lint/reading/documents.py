"""The text of a script or notebook, parsed, with a map back to the original lines."""

import ast
import io
import json
import re
import tokenize
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

_MAGIC = re.compile(r"^(?P<indent>\s*)(?P<rest>[%!].*|\?.*|[\w.]+\?{1,2}\s*)$")
# `files = !ls` and `result = %timeit f()` assign the output of a command or a magic.
_ASSIGNED = re.compile(r"^(?P<head>\s*[\w, ]+=\s*)[!%].*$")
_OTHER_LANGUAGE = re.compile(r"^%%(?!time\b|timeit\b|capture\b|prun\b)\w+")


# The cell and the line in it, both from 1, of each line of a notebook's joined cells.
CellLines = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A file that cannot be checked, with the reason and the place."""

    path: str
    what: str
    line: int = 1
    column: int = 1
    source_line: str = ""
    cell: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed file; the text of a notebook is its code cells joined."""

    path: str
    text: str
    tree: ast.Module
    lines: tuple[str, ...]
    cells: CellLines = ()

    def place(self, line: int) -> tuple[int | None, int]:
        """Return the notebook cell (or None) and the line that the user sees for a line of the text."""
        return self.cells[line - 1] if 1 <= line <= len(self.cells) else (None, line)


def read_document(path: Path, *, shown: str) -> Document | Unreadable:
    """Read and parse a script or a notebook; messages show its path as `shown`."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        return Unreadable(path=shown, what=f"The file cannot be read: {error.strerror or error}")
    if path.suffix == ".ipynb":
        return _read_notebook(raw, shown=shown)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = io.TextIOWrapper(io.BytesIO(raw), encoding).read()
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        return Unreadable(path=shown, what=f"The file is no text in a known encoding: {error}")
    return parse_document(text, shown=shown)


def parse_document(text: str, *, shown: str, cells: CellLines = ()) -> Document | Unreadable:
    """Parse Python source, or the joined cells of a notebook."""
    lines = tuple(text.splitlines())
    try:
        with warnings.catch_warnings():
            # Of what is read here nothing runs: a warning about its strings is for those who run it.
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        line = min(max(error.lineno or 1, 1), max(len(lines), 1))
        cell, number = cells[line - 1] if cells else (None, line)
        return Unreadable(
            path=shown,
            line=number,
            column=max(error.offset or 1, 1),
            what=f"The file does not parse: {error.msg}",
            source_line=lines[line - 1] if lines else "",
            cell=cell,
        )
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; code nested too deeply
        reason = str(error) or "it is nested too deeply"
        return Unreadable(path=shown, what=f"The file does not parse: {reason}")
    return Document(path=shown, text=text, tree=tree, lines=lines, cells=cells)


def _read_notebook(raw: bytes, *, shown: str) -> Document | Unreadable:
    """Join the code cells of a Jupyter notebook and parse them, with `pass` in place of IPython's magics."""
    try:
        content = json.loads(raw)
    except ValueError as error:
        return Unreadable(path=shown, what=f"The file is no notebook: {error}")
    cells = cast("dict[str, Any]", content).get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        what = "The file is no notebook of format 4: it has no list of cells"
        return Unreadable(path=shown, what=what)
    texts: list[str] = []
    places: list[tuple[int, int]] = []
    number = 0
    for cell in cast("list[Any]", cells):
        if not isinstance(cell, dict) or cast("dict[str, Any]", cell).get("cell_type") != "code":
            continue
        number += 1
        source = cast("dict[str, Any]", cell).get("source", "")
        text = "".join(map(str, cast("list[Any]", source))) if isinstance(source, list) else str(source)
        is_python = not _OTHER_LANGUAGE.match(text)
        for index, line in enumerate(text.splitlines(), start=1):
            if magic := _MAGIC.match(line):
                line = f"{magic['indent']}pass"
            elif assigned := _ASSIGNED.match(line):
                line = f"{assigned['head']}None"
            texts.append(line if is_python else "pass")
            places.append((number, index))
    return parse_document("\n".join([*texts, ""]), shown=shown, cells=places)
