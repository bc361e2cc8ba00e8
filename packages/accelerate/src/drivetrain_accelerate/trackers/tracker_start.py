"""Start the trackers of a run, and call them one after the other."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from drivetrain_accelerate.plugins.enums import LoggerType
from drivetrain_accelerate.trackers.general_tracker import GeneralTracker
from drivetrain_accelerate.trackers.tracker_choice import LOGGER_TYPE_TO_CLASS
from drivetrain_tracking import tracker_names


def split_trackers(log_with: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split what a program logs with into Accelerate's trackers and names, and those that drivetrain alone has.

    The second are its log ("jsonl"), trackers that other packages announce, and objects of drivetrain's form.
    """
    own: list[Any] = []
    others: list[Any] = []
    for each in log_with:
        is_name = isinstance(each, str | LoggerType)
        name = str(each)
        is_ours = is_name and name not in LOGGER_TYPE_TO_CLASS and (":" in name or name in tracker_names())
        is_object = not is_name and not isinstance(each, GeneralTracker | type)
        (others if is_ours or is_object else own).append(each)
    return own, others


def tracker_of(
    asked: Any, project_name: str, logging_dir: str | PathLike[str] | None, options: Mapping[str, Any]
) -> GeneralTracker:
    """Return a tracker by its name, or the program's own one as it is.

    Args:
        asked: The name, or the tracker.
        project_name: The project that the run belongs to.
        logging_dir: The folder of logs.
        options: Arguments of the trackers, by their names.
    """
    if isinstance(asked, GeneralTracker):
        return asked
    kind: Any = LOGGER_TYPE_TO_CLASS[str(asked)]
    place = [logging_dir] if kind.requires_logging_directory else []
    return kind(project_name, *place, **options.get(str(asked), {}))


def for_each_tracker(trackers: Sequence[GeneralTracker], call: Callable[[Any], object]) -> None:
    """Call each tracker, also those behind one that fails; then raise the first error, which names its tracker."""
    failed: Exception | None = None
    for tracker in trackers:
        try:
            call(tracker)
        except Exception as error:  # noqa: BLE001 raised below, once the others were called
            error.add_note(f"of the tracker {getattr(tracker, 'name', type(tracker).__name__)!r}")
            failed = failed or error
    if failed is not None:
        raise failed
