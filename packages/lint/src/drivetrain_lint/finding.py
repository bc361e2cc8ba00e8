"""The findings of the linter, and their severities."""

import ast
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """The severity of a finding: an error hangs or trains wrong, a warning may do so."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Hit:
    """A place that breaks a rule; by default, it has the rule's repair and severity."""

    node: ast.AST
    what: str
    repair: str | None = None
    severity: Severity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault in a file.

    Attributes:
        path: The file, as named on the command line or found in a folder.
        line: The line, from 1; in a notebook, the line in its cell.
        column: The column, from 1, in characters.
        end_column: The column after the place; if the place ends on a later line, the end of the first line.
        code: The rule's stable code, such as "DT101".
        name: The rule's name in words, such as "collective-on-some-ranks".
        cell: The code cell of a notebook, from 1; None in a script.
    """

    path: str
    line: int
    column: int
    end_column: int
    code: str
    name: str
    severity: Severity
    what: str
    why: str
    repair: str
    source_line: str
    cell: int | None = None

    @property
    def place(self) -> str:
        """The file, cell, line and column, in the form that terminals and editors link."""
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}:{self.column}"
