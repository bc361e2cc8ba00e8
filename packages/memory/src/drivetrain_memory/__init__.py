"""Measure peak memory, sample memory over a run, find out what holds it, and search a batch size that fits.

`record_peak` reads the counters of the kernel and of the accelerators' allocators, so that it misses no short peak.
`MemoryTracker` samples a whole run, `memory_breakdown` says what holds memory, `MemoryGuard` warns before the kernel
ends the process. `find_executable_batch_size` halves a batch size until a function fits in memory. `profile` writes
one trace per rank.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_memory.batch_size.search import ExecutableBatchSize as ExecutableBatchSize
    from drivetrain_memory.batch_size.search import TryOutcome as TryOutcome
    from drivetrain_memory.batch_size.search import accumulation_steps as accumulation_steps
    from drivetrain_memory.batch_size.search import find_executable_batch_size as find_executable_batch_size
    from drivetrain_memory.breakdown.activations import ActivationMemory as ActivationMemory
    from drivetrain_memory.breakdown.activations import record_activations as record_activations
    from drivetrain_memory.breakdown.memory_shares import MemoryBreakdown as MemoryBreakdown
    from drivetrain_memory.breakdown.memory_shares import ModuleMemory as ModuleMemory
    from drivetrain_memory.breakdown.model_memory import memory_breakdown as memory_breakdown
    from drivetrain_memory.errors import NoBatchSizeFitsError as NoBatchSizeFitsError
    from drivetrain_memory.freeing.release import clear_device_cache as clear_device_cache
    from drivetrain_memory.freeing.release import free_memory as free_memory
    from drivetrain_memory.freeing.release import release_memory as release_memory
    from drivetrain_memory.leaks.cycles import TensorCycle as TensorCycle
    from drivetrain_memory.leaks.detector import LeakDetector as LeakDetector
    from drivetrain_memory.leaks.findings import Leak as Leak
    from drivetrain_memory.leaks.findings import LeakReport as LeakReport
    from drivetrain_memory.leaks.growth import Growth as Growth
    from drivetrain_memory.memory_guard import MemoryGuard as MemoryGuard
    from drivetrain_memory.out_of_memory import is_out_of_memory as is_out_of_memory
    from drivetrain_memory.peaks.device_peak import DevicePeak as DevicePeak
    from drivetrain_memory.peaks.host_peak import ChildPeak as ChildPeak
    from drivetrain_memory.peaks.peak_record import PeakRecord as PeakRecord
    from drivetrain_memory.peaks.peak_record import record_peak as record_peak
    from drivetrain_memory.profiling.flame_graphs import flame_graph as flame_graph
    from drivetrain_memory.profiling.flame_graphs import write_flame_graph as write_flame_graph
    from drivetrain_memory.profiling.operation_times import OperationTime as OperationTime
    from drivetrain_memory.profiling.operation_times import merge_operations as merge_operations
    from drivetrain_memory.profiling.operation_times import operation_table as operation_table
    from drivetrain_memory.profiling.operation_times import read_traces as read_traces
    from drivetrain_memory.profiling.profiler_trace import profile as profile
    from drivetrain_memory.report.page import write_page as write_page
    from drivetrain_memory.report.plot import plot_memory as plot_memory
    from drivetrain_memory.tracker.memory_tracker import MemoryTracker as MemoryTracker
    from drivetrain_memory.tracker.rank_summary import RankSummary as RankSummary
    from drivetrain_memory.tracker.rank_summary import RunMemory as RunMemory
    from drivetrain_memory.tracker.rank_summary import merge_summaries as merge_summaries
    from drivetrain_memory.tracker.rank_summary import read_summaries as read_summaries
    from drivetrain_memory.usage.sampler import SamplerSettings as SamplerSettings

# Module -> its public names.
_NAMES = {
    "batch_size.search": "accumulation_steps ExecutableBatchSize find_executable_batch_size TryOutcome",
    "breakdown.activations": "ActivationMemory record_activations",
    "breakdown.memory_shares": "MemoryBreakdown ModuleMemory",
    "breakdown.model_memory": "memory_breakdown",
    "errors": "NoBatchSizeFitsError",
    "freeing.release": "clear_device_cache free_memory release_memory",
    "leaks.cycles": "TensorCycle",
    "leaks.detector": "LeakDetector",
    "leaks.findings": "Leak LeakReport",
    "leaks.growth": "Growth",
    "memory_guard": "MemoryGuard",
    "out_of_memory": "is_out_of_memory",
    "peaks.device_peak": "DevicePeak",
    "peaks.host_peak": "ChildPeak",
    "peaks.peak_record": "PeakRecord record_peak",
    "profiling.flame_graphs": "flame_graph write_flame_graph",
    "profiling.operation_times": "merge_operations operation_table OperationTime read_traces",
    "profiling.profiler_trace": "profile",
    "report.page": "write_page",
    "report.plot": "plot_memory",
    "tracker.memory_tracker": "MemoryTracker",
    "tracker.rank_summary": "merge_summaries RankSummary read_summaries RunMemory",
    "usage.sampler": "SamplerSettings",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
