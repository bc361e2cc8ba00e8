"""What a sweep finds: a table by class and way, and the list of what is not exact that it is held against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

EXACT = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inexact:
    """A line of the list: how the outcome begins, and why it is not exact."""

    outcome: str
    reason: str


def read_inexact(file: Path) -> dict[tuple[str, str], Inexact]:
    """Return the list by case and way.

    Its lines read `case | way | outcome | reason`; empty ones and those that begin with # say nothing.
    """
    found: dict[tuple[str, str], Inexact] = {}
    for line in file.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 4 or not all(parts) or (parts[0], parts[1]) in found:
            raise ValueError(
                f"{file}: {line!r}: write `case | way | outcome | reason`, each case and way once"
            )
        found[parts[0], parts[1]] = Inexact(outcome=parts[2], reason=parts[3])
    return found


class Table:
    """Outcomes by case and way; the ways are the columns."""

    def __init__(self, ways: Sequence[str]) -> None:
        self._ways = tuple(ways)
        self._rows: dict[str, Mapping[str, str]] = {}

    def add(self, name: str, outcomes: Mapping[str, str]) -> None:
        """Add a row."""
        self._rows[name] = dict(outcomes)

    def as_markdown(self, listed: Mapping[tuple[str, str], Inexact]) -> str:
        """Return the table, and below it every outcome that is not exact, in full, with its reason if it has one."""
        head = ["class", *self._ways]
        lines = ["# Dispatched models, held against themselves in memory", ""]
        lines += [_row(head), _row(["---"] * len(head))]
        lines += [
            _row([name, *(_cell(outcomes[way]) for way in self._ways)])
            for name, outcomes in self._rows.items()
        ]
        num_cells = len(self._rows) * len(self._ways)
        others = [
            (name, way, outcome)
            for name, outcomes in self._rows.items()
            for way, outcome in outcomes.items()
            if outcome != EXACT
        ]
        lines += ["", f"{num_cells - len(others)} of {num_cells} are exact. The others:", ""]
        for name, way, outcome in others:
            line = listed.get((name, way))
            lines.append(f"- {name}, {way}: {outcome}. {line.reason if line else ''}".rstrip())
        return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(outcome: str) -> str:
    return EXACT if outcome == EXACT else "see below"
