"""The trackers that a run has: those that are installed, registered, and asked for."""

from collections.abc import Sequence
from importlib.util import find_spec
from os import PathLike
from typing import Any

from drivetrain_accelerate.plugins.enums import LoggerType
from drivetrain_accelerate.trackers.general_tracker import GeneralTracker
from drivetrain_accelerate.trackers.hosted_platforms import (
    CometMLTracker,
    SwanLabTracker,
    TrackioTracker,
    WandBTracker,
)
from drivetrain_accelerate.trackers.recorded_platforms import (
    AimTracker,
    ClearMLTracker,
    DVCLiveTracker,
    MLflowTracker,
)
from drivetrain_accelerate.trackers.tensorboard_files import TensorBoardTracker

# A table that programs may read and extend, as the real one.
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    "aim": AimTracker,
    "comet_ml": CometMLTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "clearml": ClearMLTracker,
    "dvclive": DVCLiveTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
}
_IN_ORDER = (
    LoggerType.TENSORBOARD,
    LoggerType.WANDB,
    LoggerType.COMETML,
    LoggerType.AIM,
    LoggerType.MLFLOW,
    LoggerType.CLEARML,
    LoggerType.DVCLIVE,
    LoggerType.SWANLAB,
    LoggerType.TRACKIO,
)


def get_available_trackers() -> list[LoggerType]:
    """Return the platforms whose libraries are installed."""
    return [each for each in _IN_ORDER if _is_installed(each)]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` name a class of trackers by its `name`.

    Raises:
        ValueError: It is no subclass of `GeneralTracker`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"register_tracker_class({tracker_class!r}): give a subclass of accelerate.tracking.GeneralTracker"
        )
    table: dict[str, type[GeneralTracker]] = LOGGER_TYPE_TO_CLASS  # which is Accelerate's registry
    table[str(tracker_class.name)] = tracker_class  # pyright: ignore[reportAttributeAccessIssue]


def filter_trackers(log_with: Any, logging_dir: str | PathLike[str] | None = None) -> list[Any]:
    """Return the trackers to use: objects as they are, and the names of those that are installed, each once.

    Args:
        log_with: Names, "all" for all that are installed and need no more than there is, and trackers; or one of
            these.
        logging_dir: The folder of logs, which some need.

    Raises:
        ValueError: A name is unknown, or its tracker needs a folder and none is said.
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


def _needs_folder(tracker: Any) -> bool:
    kind = tracker if isinstance(tracker, GeneralTracker) else LOGGER_TYPE_TO_CLASS[str(tracker)]
    return bool(getattr(kind, "requires_logging_directory", False))


def _is_installed(platform: LoggerType) -> bool:
    if platform is LoggerType.TENSORBOARD:
        return find_spec("tensorboard") is not None or find_spec("tensorboardX") is not None
    return find_spec(str(platform)) is not None
