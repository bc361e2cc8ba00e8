"""Make trackers from names (of the log, and of platforms fed from the log) and from live objects."""

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from drivetrain_tracking.arguments import check_tracker
from drivetrain_tracking.jsonl import JSONLTracker
from drivetrain_tracking.protocol import Tracker
from drivetrain_tracking.settings import TrackingSettings

# The module of a live object's class, or one that it is in -> the tracker that can take it.
_SAME_NAME = ("aim", "clearml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
_TRACKER_OF_MODULE = {
    **{name: name for name in _SAME_NAME},
    "comet_ml": "comet",
    "tensorboardX": "tensorboard",
    "torch.utils.tensorboard": "tensorboard",  # its SummaryWriter
}


def make_trackers(
    names: Sequence[str], directory: Path | str, *, settings: TrackingSettings | None = None
) -> list[Tracker]:
    """Make the trackers of these names. The log comes first, since it feeds every platform.

    A tracker that logs on all ranks is not forwarded: each rank calls it.

    Args:
        names: Names as for `make_tracker`; `"all"` stands for every tracker whose library is installed.
        directory: The folder of the log and of the platforms' files.
        settings: The `tracking` section; the defaults if None.

    Raises:
        TypeError: The names are not a list of strings.
        UnknownTrackerError: No tracker has one of the names.
        MissingLibraryError: The library of a platform is not installed; the message names the extra that brings it.
    """
    if not names:
        return []
    # Imported here: a run without trackers has no use for platforms and writer processes.
    from drivetrain_tracking.forwarding.forwarded_tracker import DrainTime, ForwardedTracker
    from drivetrain_tracking.registry import chosen_names, make_tracker

    settings = settings or TrackingSettings()
    chosen = chosen_names(names)
    if not chosen:
        return []
    log = JSONLTracker(directory, flush_seconds=settings.flush_seconds)
    trackers: list[Tracker] = [log]
    drain_time = DrainTime(settings.drain_seconds)
    for name in chosen:
        if name != JSONLTracker.name:
            tracker = make_tracker(name, directory)
            if not tracker.on_all_ranks:
                tracker = ForwardedTracker(name, log.path, drain_time=drain_time)
            trackers.append(tracker)
    return trackers


def as_tracker(live: Any) -> Tracker:
    """Return a user's tracker, or a tracker of a user's live run of a platform.

    This process logs to a live run directly, and leaves the run open.

    Raises:
        TypeError: The object is no tracker and no live run; the message says which attributes are missing.
    """
    is_live = not isinstance(live, type) and not callable(getattr(live, "start", None))
    module = f"{type(live).__module__}."
    name = next((name for part, name in _TRACKER_OF_MODULE.items() if module.startswith(f"{part}.")), None)
    from drivetrain_tracking.registry import ENTRY_POINT_GROUP

    for point in entry_points(group=ENTRY_POINT_GROUP, name=name) if is_live and name else ():
        platform: Any = point.load()
        return platform.of(live)
    check_tracker(live)
    return cast("Tracker", live)
