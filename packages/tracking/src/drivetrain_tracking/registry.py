"""A registry of the trackers that installed packages announce by entry points."""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from drivetrain_messages import suggest
from drivetrain_tracking.errors import UnknownTrackerError
from drivetrain_tracking.platforms.platform import Platform
from drivetrain_tracking.protocol import Tracker

ENTRY_POINT_GROUP = "drivetrain.trackers"


def tracker_names() -> tuple[str, ...]:
    """Return every name that `make_tracker` knows, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def make_tracker(name: str, directory: Path | str) -> Tracker:
    """Construct a tracker by its name; the tracker's module is imported only by this call.

    Args:
        name: The name of the tracker in the entry point group `drivetrain.trackers`, or `module:Class` of your own.
        directory: The directory that the tracker may write to, its only constructor argument.

    Raises:
        UnknownTrackerError: No installed package registers the tracker; the message lists the known names.
        MissingLibraryError: The library of the tracker's platform is not installed; the message names the extra.
    """
    module_name, colon, class_name = name.partition(":")
    if colon:
        try:
            own = getattr(import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise UnknownTrackerError(
                f"tracker {name!r}: {error}; say module:Class of a tracker class that takes a folder"
            ) from error
        return own(Path(directory))
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        tracker = cast("Tracker", point.load()(Path(directory)))
        if isinstance(tracker, Platform):
            tracker.check_library()
        return tracker
    is_installed = name.isidentifier() and find_spec(name) is not None
    platform = f"the platform {name!r} is installed, but n" if is_installed else "n"
    meant = suggest(name.lower(), tracker_names())
    raise UnknownTrackerError(
        f"tracker {name!r}: {platform}o installed package brings a tracker of this name; known trackers: "
        f"{', '.join(map(repr, tracker_names()))}{meant}. Pass a tracker of your own as an object, "
        f"log_with=[MyTracker(...)] of the Accelerator (drivetrain_tracking.Tracker says what it is), or install a "
        f"package that announces one as {ENTRY_POINT_GROUP!r}"
    )


def chosen_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each once; `"all"` becomes the names of trackers whose library is installed.

    Raises:
        TypeError: The names are not a sequence of strings.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in cast("Sequence[object]", names)):
        raise TypeError(f'names={names!r}: give a list of names, such as ["jsonl", "wandb"]')
    if "all" not in names:
        return tuple(names)
    points = entry_points(group=ENTRY_POINT_GROUP)
    libraries = {point.name: getattr(point.load(), "library", None) for point in points}
    usable = sorted(
        name for name, library in libraries.items() if library is None or find_spec(library) is not None
    )
    return tuple(dict.fromkeys(one for name in names for one in (usable if name == "all" else (name,))))
