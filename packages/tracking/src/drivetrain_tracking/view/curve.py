"""The points of one metric of a run, with attempts kept apart and non-finite values kept separately."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drivetrain_tracking.view.sorted_points import SortedPoints

_MAX_BRANCHES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Points of one attempt whose steps never decrease."""

    attempt: int
    points: SortedPoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a branch."""

    branch: Branch
    start: int
    stop: int  # behind its last point
    is_replaced: bool  # a later attempt has logged these steps again


class Curve:
    """The points of one metric of a run. Not thread-safe.

    An attempt is one branch as a rule. Where code logs the same metric with two step counters, the points go to
    several branches with growing steps; points beyond 32 branches are only counted.
    """

    def __init__(self) -> None:
        self.branches: list[Branch] = []  # of finite values
        # Of other values, by their text.
        self.marks: dict[str, list[Branch]] = {"nan": [], "inf": [], "-inf": []}
        self.num_points = 0
        self.num_left_out = 0  # points that no branch could take
        self.last = 0.0

    def extend(
        self, attempt: int, steps: Sequence[int], times: Sequence[float], values: Sequence[float]
    ) -> None:
        """Append the values of an attempt in the log's order; `steps` and `times` are as long as `values`."""
        self.num_points += len(values)
        self.last = values[-1]
        # A comparison of sums costs less than one test for each value, and NaN and infinities never leave a sum.
        total = sum(values)
        if total - total == 0:
            self._place(self.branches, attempt, steps, times, values)
            return
        rows = list(zip(steps, times, values, strict=True))
        if finite := [row for row in rows if row[2] - row[2] == 0]:
            self._place(self.branches, attempt, *_columns(finite))
        others = [row for row in rows if row[2] - row[2] != 0]
        for kind, branches in self.marks.items():
            if marked := [(step, time, 0.0) for step, time, value in others if str(value) == kind]:
                self._place(branches, attempt, *_columns(marked))

    def pieces(self) -> Iterator[Piece]:
        """Yield the branches in parts: valid parts, and parts with steps that a later attempt repeated."""
        for branch in self.branches:
            later = [other.points.steps[0] for other in self.branches if other.attempt > branch.attempt]
            end = len(branch.points)
            kept = end if not later else branch.points.first_at("step", min(later))
            if kept > 0:
                yield Piece(branch=branch, start=0, stop=kept, is_replaced=False)
            if kept < end:
                yield Piece(branch=branch, start=kept, stop=end, is_replaced=True)

    def _place(
        self,
        branches: list[Branch],
        attempt: int,
        steps: Sequence[int],
        times: Sequence[float],
        values: Sequence[float],
    ) -> None:
        """Append points to branches of their attempt, and make new branches for steps that fall back."""
        own = [branch for branch in branches if branch.attempt == attempt]
        if not own:
            own = [Branch(attempt=attempt, points=SortedPoints())]
            branches.append(own[0])
        last = own[0].points.steps
        if len(own) == 1 and sorted(steps) == steps and (not last or last[-1] <= steps[0]):
            own[0].points.extend(steps, times, values)
            return
        ends = [branch.points.steps[-1] if len(branch.points) else None for branch in own]
        rows_of: dict[int, list[tuple[int, float, float]]] = {}
        for number, step, time, value in zip(
            _choose_branches(steps, ends), steps, times, values, strict=True
        ):
            if number is None:
                self.num_left_out += 1
            else:
                rows_of.setdefault(number, []).append((step, time, value))
        for number, rows in sorted(rows_of.items()):
            if number == len(own):
                own.append(Branch(attempt=attempt, points=SortedPoints()))
                branches.append(own[number])
            own[number].points.extend(*_columns(rows))


def _columns(
    rows: Sequence[tuple[int, float, float]],
) -> tuple[list[int], list[float], list[float]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _choose_branches(steps: Sequence[int], ends: Sequence[int | None]) -> list[int | None]:
    """Return the branch of each step: that with the nearest last step below, a new one, or None if none is left."""
    lasts = list(ends)
    chosen: list[int | None] = []
    for step in steps:
        fitting = [(last, number) for number, last in enumerate(lasts) if last is not None and last <= step]
        number = max(fitting)[1] if fitting else lasts.index(None) if None in lasts else len(lasts)
        if number == len(lasts):
            if number >= _MAX_BRANCHES:
                chosen.append(None)
                continue
            lasts.append(step)
        lasts[number] = step
        chosen.append(number)
    return chosen
