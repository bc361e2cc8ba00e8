"""The code cells of a Jupyter notebook as one Python source, without IPython's magics."""

import json
import re
from dataclasses import dataclass
from typing import Any, cast

_MAGIC = re.compile(r"^(?P<indent>\s*)(?P<rest>[%!].*|\?.*|[\w.]+\?{1,2}\s*)$")
# `files = !ls` and `result = %timeit f()` assign the output of a command or a magic.
_ASSIGNED = re.compile(r"^(?P<head>\s*[\w, ]+=\s*)[!%].*$")
_OTHER_LANGUAGE = re.compile(r"^%%(?!time\b|timeit\b|capture\b|prun\b)\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLine:
    """The cell and the line in it, both from 1, of a line of the joined source."""

    cell: int
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Notebook:
    """The code cells of a notebook, joined, with the cell and line of each line; magics are replaced by `pass`."""

    text: str
    lines: tuple[CellLine, ...]


def read_notebook(raw: bytes) -> Notebook | str:
    """Return the code of a notebook, or the reason why it cannot be read."""
    try:
        content = json.loads(raw)
    except ValueError as error:
        return f"is no notebook: {error}"
    cells = cast("dict[str, Any]", content).get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        return "is no notebook of format 4: it has no list of cells"
    texts: list[str] = []
    places: list[CellLine] = []
    number = 0
    for cell in cast("list[Any]", cells):
        if not isinstance(cell, dict) or cast("dict[str, Any]", cell).get("cell_type") != "code":
            continue
        number += 1
        source = cast("dict[str, Any]", cell).get("source", "")
        text = "".join(map(str, cast("list[Any]", source))) if isinstance(source, list) else str(source)
        is_python = not _OTHER_LANGUAGE.match(text)
        for index, line in enumerate(text.splitlines(), start=1):
            texts.append(_without_magic(line) if is_python else "pass")
            places.append(CellLine(cell=number, line=index))
    return Notebook(text="\n".join([*texts, ""]), lines=tuple(places))


def _without_magic(line: str) -> str:
    if magic := _MAGIC.match(line):
        return f"{magic['indent']}pass"
    if assigned := _ASSIGNED.match(line):
        return f"{assigned['head']}None"
    return line
