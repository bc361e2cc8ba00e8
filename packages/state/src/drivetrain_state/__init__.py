"""Ranks, device, mesh, collectives, seeds, rank-aware logging, and a watchdog that finds the cause of a hang."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_state.collectives.control import local_main_process_first as local_main_process_first
    from drivetrain_state.collectives.control import main_process_first as main_process_first
    from drivetrain_state.collectives.control import on_last_process as on_last_process
    from drivetrain_state.collectives.control import on_local_main_process as on_local_main_process
    from drivetrain_state.collectives.control import on_main_process as on_main_process
    from drivetrain_state.collectives.control import on_process as on_process
    from drivetrain_state.collectives.control import print_on_main as print_on_main
    from drivetrain_state.collectives.control import split_between_processes as split_between_processes
    from drivetrain_state.collectives.control import split_for_process as split_for_process
    from drivetrain_state.collectives.logs import RankLogger as RankLogger
    from drivetrain_state.collectives.logs import get_logger as get_logger
    from drivetrain_state.collectives.operations import ReduceOp as ReduceOp
    from drivetrain_state.collectives.operations import barrier as barrier
    from drivetrain_state.collectives.operations import broadcast as broadcast
    from drivetrain_state.collectives.operations import broadcast_object as broadcast_object
    from drivetrain_state.collectives.operations import gather as gather
    from drivetrain_state.collectives.operations import gather_object as gather_object
    from drivetrain_state.collectives.operations import pad_across_processes as pad_across_processes
    from drivetrain_state.collectives.operations import reduce as reduce
    from drivetrain_state.collectives.scatter import scatter as scatter
    from drivetrain_state.collectives.seed import derive_seed as derive_seed
    from drivetrain_state.collectives.seed import deterministic_algorithms as deterministic_algorithms
    from drivetrain_state.collectives.seed import load_rng_state as load_rng_state
    from drivetrain_state.collectives.seed import reseed as reseed
    from drivetrain_state.collectives.seed import rng_state as rng_state
    from drivetrain_state.collectives.seed import set_seed as set_seed
    from drivetrain_state.collectives.seed import synchronize_rng_states as synchronize_rng_states
    from drivetrain_state.connection import build_mesh as build_mesh
    from drivetrain_state.connection import connect as connect
    from drivetrain_state.connection import group_backend as group_backend
    from drivetrain_state.context import Context as Context
    from drivetrain_state.detect import DeviceCapability as DeviceCapability
    from drivetrain_state.detect import DeviceGroup as DeviceGroup
    from drivetrain_state.detect import best_device_kind as best_device_kind
    from drivetrain_state.detect import capabilities as capabilities
    from drivetrain_state.detect import describe_environment as describe_environment
    from drivetrain_state.detect import detect_devices as detect_devices
    from drivetrain_state.detect import device_count as device_count
    from drivetrain_state.errors import CollectiveMismatchError as CollectiveMismatchError
    from drivetrain_state.errors import ConnectError as ConnectError
    from drivetrain_state.errors import DeviceError as DeviceError
    from drivetrain_state.errors import GroupMismatchError as GroupMismatchError
    from drivetrain_state.errors import LeafError as LeafError
    from drivetrain_state.errors import OtherRankFailedError as OtherRankFailedError
    from drivetrain_state.group_renewal import GroupRenewal as GroupRenewal
    from drivetrain_state.hang.progress_record import ProgressMark as ProgressMark
    from drivetrain_state.hang.progress_record import ProgressRecord as ProgressRecord
    from drivetrain_state.hang.watchdog import Watchdog as Watchdog
    from drivetrain_state.hang.watchdog import start_watchdog as start_watchdog
    from drivetrain_state.mesh import MeshPlan as MeshPlan
    from drivetrain_state.mesh import ParallelDims as ParallelDims
    from drivetrain_state.rank0_store import control_store as control_store
    from drivetrain_state.settings import DeviceChoice as DeviceChoice
    from drivetrain_state.settings import StateSettings as StateSettings
    from drivetrain_state.topology import Topology as Topology
    from drivetrain_state.topology import topology_from_hosts as topology_from_hosts

# Module -> its public names.
_NAMES = {
    "collectives.control": "local_main_process_first main_process_first on_last_process on_local_main_process "
    "on_main_process on_process print_on_main split_between_processes split_for_process",
    "collectives.logs": "get_logger RankLogger",
    "collectives.operations": "barrier broadcast broadcast_object gather gather_object pad_across_processes reduce "
    "ReduceOp",
    "collectives.scatter": "scatter",
    "collectives.seed": "derive_seed deterministic_algorithms load_rng_state reseed rng_state set_seed "
    "synchronize_rng_states",
    "connection": "build_mesh connect group_backend",
    "context": "Context",
    "rank0_store": "control_store",
    "detect": "best_device_kind capabilities describe_environment detect_devices device_count DeviceCapability "
    "DeviceGroup",
    "errors": "CollectiveMismatchError ConnectError DeviceError GroupMismatchError LeafError OtherRankFailedError",
    "group_renewal": "GroupRenewal",
    "hang.progress_record": "ProgressMark ProgressRecord",
    "hang.watchdog": "start_watchdog Watchdog",
    "mesh": "MeshPlan ParallelDims",
    "settings": "DeviceChoice StateSettings",
    "topology": "Topology topology_from_hosts",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
