"""The trackers of a run: choose installed and registered trackers, start them and call them."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from os import PathLike
from typing import Any

from drivetrain_accelerate.plugins.enums import LoggerType
from drivetrain_accelerate.trackers import platforms
from drivetrain_accelerate.trackers.general_tracker import GeneralTracker
from drivetrain_tracking import tracker_names

# A table that programs may read and extend, as the real one.
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {kind.name: kind for kind in platforms.TRACKERS}
_PLATFORMS = tuple(map(LoggerType, LOGGER_TYPE_TO_CLASS))


def get_available_trackers() -> list[LoggerType]:
    """Return the platforms whose libraries are installed."""
    return [each for each in _PLATFORMS if _is_installed(each)]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a tracker class, so that `log_with` accepts its `name`; a ValueError refuses other classes."""
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"register_tracker_class({tracker_class!r}): give a subclass of accelerate.tracking.GeneralTracker"
        )
    table: dict[str, type[GeneralTracker]] = LOGGER_TYPE_TO_CLASS  # which is Accelerate's registry
    table[str(tracker_class.name)] = tracker_class  # pyright: ignore[reportAttributeAccessIssue]


def filter_trackers(log_with: Any, logging_dir: str | PathLike[str] | None = None) -> list[Any]:
    """Return the trackers to use: tracker objects unchanged, and the names of installed trackers, each name once.

    `log_with` is a name, a tracker, a list of these, or "all": all installed trackers, without those that need a
    missing folder. A ValueError refuses unknown names, and trackers that need a folder of logs if none is given.
    """
    found: list[Any] = []
    asked: Sequence[Any] = log_with if isinstance(log_with, list | tuple) else [log_with] if log_with else []
    for each in asked:
        if isinstance(each, GeneralTracker):
            found.append(each)
            continue
        name = str(each)
        if name == "all":
            usable = [
                one for one in get_available_trackers() if logging_dir is not None or not _needs_folder(one)
            ]
            found += [one for one in usable if one not in found]
            continue
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"log_with={each!r}: must be one of all, {', '.join(LOGGER_TYPE_TO_CLASS)}")
        chosen = LoggerType(name) if name in LoggerType else name
        if chosen not in found and (isinstance(chosen, str) or _is_installed(chosen)):
            found.append(chosen)
    if logging_dir is None and (lacking := [str(each) for each in found if _needs_folder(each)]):
        raise ValueError(f"log_with={', '.join(lacking)}: writes files: say Accelerator(project_dir=...)")
    return found


def split_trackers(log_with: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split `log_with` into Accelerate's trackers and names, and the trackers that only drivetrain has.

    Only drivetrain has its log ("jsonl"), trackers of installed plug-ins, and objects in its own tracker format.
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
    """Return a named tracker with its own entry of `options`; return a tracker object unchanged."""
    if isinstance(asked, GeneralTracker):
        return asked
    kind: Any = LOGGER_TYPE_TO_CLASS[str(asked)]
    place = [logging_dir] if kind.requires_logging_directory else []
    return kind(project_name, *place, **options.get(str(asked), {}))


def for_each_tracker(trackers: Sequence[GeneralTracker], call: Callable[[Any], object]) -> None:
    """Call all trackers, even if one fails; then raise the first error, with a note of its tracker's name."""
    failed: Exception | None = None
    for tracker in trackers:
        try:
            call(tracker)
        except Exception as error:  # noqa: BLE001 raised below, once the others were called
            error.add_note(f"of the tracker {getattr(tracker, 'name', type(tracker).__name__)!r}")
            failed = failed or error
    if failed is not None:
        raise failed


def _needs_folder(tracker: Any) -> bool:
    kind = tracker if isinstance(tracker, GeneralTracker) else LOGGER_TYPE_TO_CLASS[str(tracker)]
    return bool(getattr(kind, "requires_logging_directory", False))


def _is_installed(platform: LoggerType) -> bool:
    if platform is LoggerType.TENSORBOARD:
        return find_spec("tensorboard") is not None or find_spec("tensorboardX") is not None
    return find_spec(str(platform)) is not None
