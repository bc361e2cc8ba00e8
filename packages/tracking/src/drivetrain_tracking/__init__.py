"""A tracker interface for many platforms, and a JSONL tracker without dependencies.

`TrackerGroup` logs to several trackers from the right rank and names a tracker that fails. `make_tracker` creates
trackers that installed packages register. `JSONLTracker` writes a JSON Lines file that survives kills and resumes.
`ThroughputMeter`, `PhaseTimes` and `find_straggler` measure a training loop, and `LiveLine` shows how fast it is.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_tracking.errors import TrackerFailedError as TrackerFailedError
    from drivetrain_tracking.errors import TrackerStateError as TrackerStateError
    from drivetrain_tracking.errors import UnknownTrackerError as UnknownTrackerError
    from drivetrain_tracking.errors import ValueNotLoggableError as ValueNotLoggableError
    from drivetrain_tracking.group import TrackerGroup as TrackerGroup
    from drivetrain_tracking.jsonl import JSONLTracker as JSONLTracker
    from drivetrain_tracking.plain import plain_config as plain_config
    from drivetrain_tracking.plain import plain_values as plain_values
    from drivetrain_tracking.protocol import Metrics as Metrics
    from drivetrain_tracking.protocol import PlanTracker as PlanTracker
    from drivetrain_tracking.protocol import Tracker as Tracker
    from drivetrain_tracking.registry import chosen_names as chosen_names
    from drivetrain_tracking.registry import make_tracker as make_tracker
    from drivetrain_tracking.registry import tracker_names as tracker_names
    from drivetrain_tracking.settings import TrackingSettings as TrackingSettings
    from drivetrain_tracking.throughput.device_peaks import peak_flops as peak_flops
    from drivetrain_tracking.throughput.live_line import LiveLine as LiveLine
    from drivetrain_tracking.throughput.meter import StepRecord as StepRecord
    from drivetrain_tracking.throughput.meter import Throughput as Throughput
    from drivetrain_tracking.throughput.meter import ThroughputMeter as ThroughputMeter
    from drivetrain_tracking.throughput.phase_times import PhaseTimes as PhaseTimes
    from drivetrain_tracking.throughput.straggler import Straggler as Straggler
    from drivetrain_tracking.throughput.straggler import find_straggler as find_straggler

# Public name -> the module that defines it.
_MODULES = {
    "JSONLTracker": "jsonl",
    "PlanTracker": "protocol",
    "Tracker": "protocol",
    "TrackerFailedError": "errors",
    "TrackerGroup": "group",
    "TrackerStateError": "errors",
    "TrackingSettings": "settings",
    "UnknownTrackerError": "errors",
    "ValueNotLoggableError": "errors",
    "Metrics": "protocol",
    "LiveLine": "throughput.live_line",
    "PhaseTimes": "throughput.phase_times",
    "StepRecord": "throughput.meter",
    "Straggler": "throughput.straggler",
    "Throughput": "throughput.meter",
    "ThroughputMeter": "throughput.meter",
    "find_straggler": "throughput.straggler",
    "peak_flops": "throughput.device_peaks",
    "chosen_names": "registry",
    "make_tracker": "registry",
    "plain_config": "plain",
    "plain_values": "plain",
    "tracker_names": "registry",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"drivetrain_tracking.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'drivetrain_tracking' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
