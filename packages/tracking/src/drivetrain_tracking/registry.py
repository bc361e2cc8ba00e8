"""A registry of the trackers that installed packages announce by entry points."""

from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from drivetrain_tracking.errors import UnknownTrackerError
from drivetrain_tracking.protocol import Tracker

ENTRY_POINT_GROUP = "drivetrain.trackers"


def tracker_names() -> tuple[str, ...]:
    """Return every name that `make_tracker` knows, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def make_tracker(name: str, directory: Path | str) -> Tracker:
    """Construct a tracker by its name, importing its module only now.

    Args:
        name: The name of the tracker in the entry point group `drivetrain.trackers`.
        directory: The directory that the tracker may write to, its only constructor argument.

    Raises:
        UnknownTrackerError: No installed package registers the tracker; the message lists the known names.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return cast("Tracker", point.load()(Path(directory)))
    platform = f"the platform {name!r} is installed, but n" if _is_installed(name) else "n"
    raise UnknownTrackerError(
        f"tracker {name!r}: {platform}o installed package brings a tracker of this name; those there are: "
        f"{', '.join(map(repr, tracker_names()))}. Pass a tracker of your own as an object, "
        f"log_with=[MyTracker(...)] of the Accelerator (drivetrain_tracking.Tracker says what it is), or install a "
        f"package that announces one as {ENTRY_POINT_GROUP!r}"
    )


def chosen_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names with `"all"` replaced by every known name; with `"all"`, each name occurs once."""
    found = [one for name in names for one in (tracker_names() if name == "all" else (name,))]
    return tuple(dict.fromkeys(found)) if "all" in names else tuple(names)


def _is_installed(name: str) -> bool:
    """Return whether a Python module of this name can be found, without importing it."""
    return name.isidentifier() and find_spec(name) is not None
