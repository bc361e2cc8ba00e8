"""Which trackers there are: those that installed packages announce by entry point."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from drivetrain_tracking.errors import UnknownTrackerError
from drivetrain_tracking.protocol import Tracker

ENTRY_POINT_GROUP = "drivetrain.trackers"


def tracker_names() -> tuple[str, ...]:
    """Every name that `make_tracker` knows, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def make_tracker(name: str, directory: Path | str) -> Tracker:
    """A tracker by its name; its module is imported only now.

    Args:
        name: As its package announces it in the entry point group `drivetrain.trackers`.
        directory: Where it may write files; a tracker is constructed with nothing else.

    Raises:
        UnknownTrackerError: No installed package brings it; the message lists those there are.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return cast("Tracker", point.load()(Path(directory)))
    raise UnknownTrackerError(
        f"tracker {name!r} is not installed: say one of {', '.join(map(repr, tracker_names()))}; that of another "
        f"package is found by its entry point {ENTRY_POINT_GROUP!r} once the package is installed"
    )
