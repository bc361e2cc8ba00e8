"""The losses of two runs side by side, and whether they are the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain_messages import format_table


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """A step of both runs.

    Attributes:
        rank: The rank of the process.
        step: The number of the loss in its process, from 1.
        real: The loss under the real Accelerate; None if the run has ended before.
        ours: The loss under the interface; None if the run has ended before.
    """

    rank: int
    step: int
    real: float | None
    ours: float | None

    def is_same(self, tolerance: float) -> bool:
        """Return whether both losses are there, and differ by no more than a fraction of the larger one."""
        if self.real is None or self.ours is None:
            return False
        if math.isnan(self.real) and math.isnan(self.ours):
            return True
        return math.isclose(self.real, self.ours, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


def rows_of(real: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> list[LossRow]:
    """Return the steps of both runs, those of each rank together.

    Args:
        real: The losses of each rank under the real Accelerate.
        ours: The losses of each rank under the interface.
    """
    return [
        LossRow(
            rank=rank,
            step=step + 1,
            real=theirs[step] if step < len(theirs) else None,
            ours=mine[step] if step < len(mine) else None,
        )
        for rank, (theirs, mine) in enumerate(zip(real, ours, strict=True))
        for step in range(max(len(theirs), len(mine)))
    ]


def table_of(rows: Sequence[LossRow], tolerance: float) -> str:
    """Return the steps as a table, with a mark at those that differ."""
    has_ranks = any(row.rank for row in rows)
    head = [*(["rank"] if has_ranks else []), "step", "real", "ours", "difference", ""]
    cells = [head]
    for row in rows:
        difference = "" if row.real is None or row.ours is None else f"{row.ours - row.real:+.2e}"
        mark = "" if row.is_same(tolerance) else "differs"
        first = [str(row.rank)] if has_ranks else []
        cells.append([*first, str(row.step), _shown(row.real), _shown(row.ours), difference, mark])
    return format_table(cells, right=range(len(head)))


def _shown(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.8g}"
