"""The trackers that a run logs to: those named in settings, and objects given in code."""

from collections.abc import Sequence
from typing import TypeAlias

from drivetrain.settings import RunSettings
from drivetrain_tracking import Tracker, TrackerGroup, TrackingSettings, as_tracker, make_trackers

LogWith: TypeAlias = Sequence[str | Tracker] | str | Tracker


def split_log_with(log_with: LogWith | None) -> tuple[tuple[str, ...] | None, tuple[Tracker, ...]]:
    """Split `log_with` into names, which are settings, and objects, which no file could hold.

    Returns:
        The names, or None if nothing was given; and the objects, live runs of platforms as trackers.

    Raises:
        TypeError: An element is neither a name, a tracker nor a live run; the message says what it lacks.
    """
    if log_with is None:
        return None, ()
    given = list(log_with) if isinstance(log_with, Sequence) and not isinstance(log_with, str) else [log_with]
    objects = tuple(as_tracker(one) for one in given if not isinstance(one, str))
    return tuple(one for one in given if isinstance(one, str)), objects


def group_trackers(
    settings: RunSettings, objects: Sequence[Tracker], *, is_main: bool, section: TrackingSettings
) -> TrackerGroup:
    """Create the trackers named in the settings, and group them with those given as objects.

    Raises:
        UnknownTrackerError: No installed package provides one of the names.
        MissingLibraryError: The library of a platform is not installed.
        ValueError: Two trackers have the same name.
    """
    directory = settings.project_dir
    assert directory is not None or not settings.log_with  # RunSettings refuses names without it
    named = make_trackers(settings.log_with, directory or "", settings=section)
    return TrackerGroup([*named, *objects], is_main=is_main, settings=section)
