"""Make trackers of names (the log, and platforms that are fed from it) and of live objects."""

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
    """Make the trackers of these names: the log, which every platform is fed from, comes first.

    A tracker that logs on all ranks is not forwarded: each rank calls it.

    Args:
        names: Names as for `make_tracker`; `"all"` is every one whose library is installed.
        directory: The folder of the log and of what platforms write.
        settings: The `tracking` section; the defaults if None.

    Raises:
        TypeError: The names are no list of strings.
        UnknownTrackerError: There is no tracker of a name.
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

    A live run is logged to in this process, as it was made, and left open.

    Raises:
        TypeError: The object is neither; the message says what it lacks.
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
