"""Measure peak memory, find a batch size that fits, free cached memory, and profile.

`PeakMemory` reads the counters of the kernel and of the accelerator's allocator, so that it misses no short peak.
`find_executable_batch_size` halves a batch size until a function fits in memory. `profile` writes one trace per rank.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_memory.batch_size.executable import ExecutableBatchSize as ExecutableBatchSize
    from drivetrain_memory.batch_size.executable import TryOutcome as TryOutcome
    from drivetrain_memory.batch_size.executable import accumulation_steps as accumulation_steps
    from drivetrain_memory.batch_size.search import find_executable_batch_size as find_executable_batch_size
    from drivetrain_memory.errors import NoBatchSizeFitsError as NoBatchSizeFitsError
    from drivetrain_memory.freeing.release import clear_device_cache as clear_device_cache
    from drivetrain_memory.freeing.release import free_memory as free_memory
    from drivetrain_memory.freeing.release import release_memory as release_memory
    from drivetrain_memory.leaks.cycles import TensorCycle as TensorCycle
    from drivetrain_memory.leaks.detector import LeakDetector as LeakDetector
    from drivetrain_memory.leaks.findings import Leak as Leak
    from drivetrain_memory.leaks.growth import Growth as Growth
    from drivetrain_memory.leaks.leak_report import LeakReport as LeakReport
    from drivetrain_memory.out_of_memory import is_out_of_memory as is_out_of_memory
    from drivetrain_memory.peak import PeakMemory as PeakMemory
    from drivetrain_memory.profiling.flame_graphs import flame_graph as flame_graph
    from drivetrain_memory.profiling.flame_graphs import write_flame_graph as write_flame_graph
    from drivetrain_memory.profiling.operation_times import OperationTime as OperationTime
    from drivetrain_memory.profiling.operation_times import merge_operations as merge_operations
    from drivetrain_memory.profiling.operation_times import operation_table as operation_table
    from drivetrain_memory.profiling.operation_times import read_traces as read_traces
    from drivetrain_memory.profiling.profiler_trace import profile as profile

# Public name -> the module that defines it.
_MODULES = {
    "ExecutableBatchSize": "batch_size.executable",
    "TryOutcome": "batch_size.executable",
    "accumulation_steps": "batch_size.executable",
    "Growth": "leaks.growth",
    "Leak": "leaks.findings",
    "LeakDetector": "leaks.detector",
    "LeakReport": "leaks.leak_report",
    "NoBatchSizeFitsError": "errors",
    "OperationTime": "profiling.operation_times",
    "PeakMemory": "peak",
    "TensorCycle": "leaks.cycles",
    "clear_device_cache": "freeing.release",
    "find_executable_batch_size": "batch_size.search",
    "flame_graph": "profiling.flame_graphs",
    "free_memory": "freeing.release",
    "is_out_of_memory": "out_of_memory",
    "read_traces": "profiling.operation_times",
    "release_memory": "freeing.release",
    "merge_operations": "profiling.operation_times",
    "operation_table": "profiling.operation_times",
    "profile": "profiling.profiler_trace",
    "write_flame_graph": "profiling.flame_graphs",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"drivetrain_memory.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'drivetrain_memory' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
