"""Choose the trackers that a run logs to, from names in settings and objects given in code."""

from collections.abc import Sequence
from typing import TypeAlias

from drivetrain_tracking import Tracker, as_tracker

LogWith: TypeAlias = Sequence[str | Tracker] | str | Tracker


def split_log_with(log_with: LogWith | None) -> tuple[tuple[str, ...] | None, tuple[Tracker, ...]]:
    """Split `log_with` into tracker names, which become settings, and tracker objects, which cannot.

    Live runs of platforms become trackers. Any other element raises a TypeError.
    """
    if log_with is None:
        return None, ()
    given = list(log_with) if isinstance(log_with, Sequence) and not isinstance(log_with, str) else [log_with]
    objects = tuple(as_tracker(one) for one in given if not isinstance(one, str))
    return tuple(one for one in given if isinstance(one, str)), objects
