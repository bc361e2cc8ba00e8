"""Measure training: throughput, the phases of a step, MFU and the slowest rank; show them in a live line.

`ThroughputMeter` and `PhaseTimes` serve any loop; `step_watch.py` uses them to measure the loop of an Accelerator.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_throughput.device_peaks import peak_flops as peak_flops
    from drivetrain_throughput.live_line import LiveLine as LiveLine
    from drivetrain_throughput.meter import StepRecord as StepRecord
    from drivetrain_throughput.meter import Throughput as Throughput
    from drivetrain_throughput.meter import ThroughputMeter as ThroughputMeter
    from drivetrain_throughput.phase_times import PhaseTimes as PhaseTimes
    from drivetrain_throughput.straggler import Straggler as Straggler
    from drivetrain_throughput.straggler import find_straggler as find_straggler

# Module -> its public names.
_NAMES = {
    "device_peaks": "peak_flops",
    "live_line": "LiveLine",
    "meter": "StepRecord Throughput ThroughputMeter",
    "phase_times": "PhaseTimes",
    "straggler": "find_straggler Straggler",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"drivetrain_throughput.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'drivetrain_throughput' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
