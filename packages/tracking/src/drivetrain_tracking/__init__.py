"""A run's log that survives kills and resumes, and every tracking platform fed from it.

`JSONLTracker` writes the log, without dependencies. `make_trackers` makes trackers by name: a writer process beside
the training feeds each platform from the log, so that no platform can slow, stop or crash the run. `TrackerGroup`
logs to several trackers from the right rank and names a tracker that fails; `make_tracker` creates a single tracker.
Besides numbers, `Image`, `Table` and other media can be logged.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_tracking.choose import as_tracker as as_tracker
    from drivetrain_tracking.choose import make_trackers as make_trackers
    from drivetrain_tracking.errors import DeliveryFileError as DeliveryFileError
    from drivetrain_tracking.errors import DeliveryInUseError as DeliveryInUseError
    from drivetrain_tracking.errors import MissingLibraryError as MissingLibraryError
    from drivetrain_tracking.errors import SpoolInUseError as SpoolInUseError
    from drivetrain_tracking.errors import TrackerFailedError as TrackerFailedError
    from drivetrain_tracking.errors import TrackerStateError as TrackerStateError
    from drivetrain_tracking.errors import UnknownTrackerError as UnknownTrackerError
    from drivetrain_tracking.errors import ValueNotLoggableError as ValueNotLoggableError
    from drivetrain_tracking.forwarding.forwarded_tracker import ForwardedTracker as ForwardedTracker
    from drivetrain_tracking.group import TrackerGroup as TrackerGroup
    from drivetrain_tracking.jsonl import JSONLTracker as JSONLTracker
    from drivetrain_tracking.media.data import Artifact as Artifact
    from drivetrain_tracking.media.data import Histogram as Histogram
    from drivetrain_tracking.media.data import Table as Table
    from drivetrain_tracking.media.data import Text as Text
    from drivetrain_tracking.media.files import Audio as Audio
    from drivetrain_tracking.media.files import Figure as Figure
    from drivetrain_tracking.media.files import Image as Image
    from drivetrain_tracking.media.files import Video as Video
    from drivetrain_tracking.platforms.aim import AimTracker as AimTracker
    from drivetrain_tracking.platforms.clearml import ClearMLTracker as ClearMLTracker
    from drivetrain_tracking.platforms.comet import CometTracker as CometTracker
    from drivetrain_tracking.platforms.dvclive import DVCLiveTracker as DVCLiveTracker
    from drivetrain_tracking.platforms.mlflow import MLflowTracker as MLflowTracker
    from drivetrain_tracking.platforms.platform import Platform as Platform
    from drivetrain_tracking.platforms.swanlab import SwanLabTracker as SwanLabTracker
    from drivetrain_tracking.platforms.tensorboard import TensorBoardTracker as TensorBoardTracker
    from drivetrain_tracking.platforms.trackio import TrackioTracker as TrackioTracker
    from drivetrain_tracking.platforms.wandb import WandbTracker as WandbTracker
    from drivetrain_tracking.protocol import InfoTracker as InfoTracker
    from drivetrain_tracking.protocol import Metrics as Metrics
    from drivetrain_tracking.protocol import PlanTracker as PlanTracker
    from drivetrain_tracking.protocol import PlatformTracker as PlatformTracker
    from drivetrain_tracking.protocol import Tracker as Tracker
    from drivetrain_tracking.registry import chosen_names as chosen_names
    from drivetrain_tracking.registry import make_tracker as make_tracker
    from drivetrain_tracking.registry import tracker_names as tracker_names
    from drivetrain_tracking.run.run_info import collect_info as collect_info
    from drivetrain_tracking.settings import TrackingSettings as TrackingSettings
    from drivetrain_tracking.values.plain import plain_config as plain_config
    from drivetrain_tracking.values.plain import plain_values as plain_values
    from drivetrain_tracking.values.records import LoggedRecord as LoggedRecord
    from drivetrain_tracking.values.records import StoredMedium as StoredMedium

# Module -> its public names.
_NAMES = {
    "choose": "as_tracker make_trackers",
    "errors": "DeliveryFileError DeliveryInUseError MissingLibraryError SpoolInUseError TrackerFailedError "
    "TrackerStateError UnknownTrackerError ValueNotLoggableError",
    "forwarding.forwarded_tracker": "ForwardedTracker",
    "group": "TrackerGroup",
    "jsonl": "JSONLTracker",
    "media.data": "Artifact Histogram Table Text",
    "media.files": "Audio Figure Image Video",
    "platforms.aim": "AimTracker",
    "platforms.clearml": "ClearMLTracker",
    "platforms.comet": "CometTracker",
    "platforms.dvclive": "DVCLiveTracker",
    "platforms.mlflow": "MLflowTracker",
    "platforms.platform": "Platform",
    "platforms.swanlab": "SwanLabTracker",
    "platforms.tensorboard": "TensorBoardTracker",
    "platforms.trackio": "TrackioTracker",
    "platforms.wandb": "WandbTracker",
    "protocol": "InfoTracker Metrics PlanTracker PlatformTracker Tracker",
    "registry": "chosen_names make_tracker tracker_names",
    "run.run_info": "collect_info",
    "settings": "TrackingSettings",
    "values.plain": "plain_config plain_values",
    "values.records": "LoggedRecord StoredMedium",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
