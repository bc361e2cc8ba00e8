"""Lay out the text of a help: headings, and rows of a name and what it is, in colours on a terminal."""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import wrap

from drivetrain_config import environ
from drivetrain_messages.console import said_colours

_NARROWEST, _USUAL, _WIDEST = 60, 80, 110  # columns of text
# The blue can be read on a dark and on a light background.
_HEADING, _NAME, _END = "\033[1m", "\033[38;5;31m", "\033[0m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The place of a help: its width in columns, and whether it shows colours."""

    width: int = _USUAL
    is_coloured: bool = False

    @classmethod
    def of_terminal(cls) -> "Page":
        """Return the page of stdout: coloured if it is a terminal, by the rule of NO_COLOR and FORCE_COLOR."""
        environment = environ.child_environment()
        columns = environment.get("COLUMNS", "")
        try:
            width = int(columns) if columns.isdecimal() else os.get_terminal_size(1).columns
        except OSError:  # stdout is no terminal
            width = _USUAL
        said = said_colours(environment)
        is_terminal = os.isatty(1) and environment.get("TERM") not in (None, "", "dumb")
        return cls(
            width=min(max(width, _NARROWEST), _WIDEST),
            # Another stream in the place of stdout, as in a notebook or a test, is no terminal.
            is_coloured=sys.stdout is sys.__stdout__ and (is_terminal if said is None else said),
        )

    def heading(self, text: str) -> str:
        """Return a heading."""
        return self._paint(text, _HEADING)

    def paragraph(self, text: str) -> str:
        """Return a text, wrapped."""
        return "\n".join(wrap(text, self.width, break_on_hyphens=False))

    def rows(self, rows: Iterable[tuple[str, str]], *, column: int) -> str:
        """Return rows of a name and what it is, whose texts begin at a column.

        A text follows its name on the next line if the name is too long.
        """
        lines: list[str] = []
        for name, text in rows:
            wrapped = wrap(text, self.width - column, break_on_hyphens=False) or [""]
            if len(name) + 4 > column:
                wrapped = ["", *wrapped]
            blanks = " " * (column - 2 - len(name))
            lines.append(f"  {self._paint(name, _NAME)}{blanks}{wrapped[0]}".rstrip())
            lines += [f"{' ' * column}{line}" for line in wrapped[1:]]
        return "\n".join(lines)

    def _paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_END}" if self.is_coloured else text
