"""Write a PyTorch training loop once; run it on anything by changing the launch.

`Accelerator` connects the loop to the hardware it runs on. It is thin: each part is a package of its own, and this
package re-exports the names that most programs need.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.accelerator.accelerator import Accelerator as Accelerator
    from drivetrain.early_stopping import EarlyStopping as EarlyStopping
    from drivetrain.plan.effective_plan import EffectivePlan as EffectivePlan
    from drivetrain.plan.effective_plan import PlanMismatchError as PlanMismatchError
    from drivetrain.plan.effective_plan import PlanRow as PlanRow
    from drivetrain.probes import find_learning_rate as find_learning_rate
    from drivetrain.probes import gradient_noise as gradient_noise
    from drivetrain.saving.hooks import CheckpointHook as CheckpointHook
    from drivetrain.settings import RunSettings as RunSettings
    from drivetrain_backends import AccumulationError as AccumulationError
    from drivetrain_backends import BackendRegistry as BackendRegistry
    from drivetrain_backends import BatchMismatchError as BatchMismatchError
    from drivetrain_backends import DDPSettings as DDPSettings
    from drivetrain_backends import PairingError as PairingError
    from drivetrain_backends import UnknownBackendError as UnknownBackendError
    from drivetrain_backends import register_backend as register_backend
    from drivetrain_checkpoint import Checkpointer as Checkpointer
    from drivetrain_checkpoint import CheckpointSettings as CheckpointSettings
    from drivetrain_config import ConfigError as ConfigError
    from drivetrain_config import Layers as Layers
    from drivetrain_config import resolve as resolve
    from drivetrain_data import DataSettings as DataSettings
    from drivetrain_data import Shard as Shard
    from drivetrain_data import ShardedLoader as ShardedLoader
    from drivetrain_data import shard_loader as shard_loader
    from drivetrain_data import skip_first_batches as skip_first_batches
    from drivetrain_dispatch import compute_module_sizes as compute_module_sizes
    from drivetrain_dispatch import cpu_offload as cpu_offload
    from drivetrain_dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from drivetrain_dispatch import disk_offload as disk_offload
    from drivetrain_dispatch import dispatch_model as dispatch_model
    from drivetrain_dispatch import find_tied_parameters as find_tied_parameters
    from drivetrain_dispatch import infer_auto_device_map as infer_auto_device_map
    from drivetrain_dispatch import init_empty_weights as init_empty_weights
    from drivetrain_dispatch import init_on_device as init_on_device
    from drivetrain_dispatch import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from drivetrain_dispatch import load_checkpoint_in_model as load_checkpoint_in_model
    from drivetrain_dispatch import remove_hooks as remove_hooks
    from drivetrain_dispatch import retie_parameters as retie_parameters
    from drivetrain_launcher import debug_launcher as debug_launcher
    from drivetrain_launcher import notebook_launcher as notebook_launcher
    from drivetrain_memory import LeakDetector as LeakDetector
    from drivetrain_memory import clear_device_cache as clear_device_cache
    from drivetrain_memory import find_executable_batch_size as find_executable_batch_size
    from drivetrain_memory import free_memory as free_memory
    from drivetrain_memory import record_peak as record_peak
    from drivetrain_memory import release_memory as release_memory
    from drivetrain_precision import PrecisionError as PrecisionError
    from drivetrain_precision import PrecisionSettings as PrecisionSettings
    from drivetrain_precision import supported_modes as supported_modes
    from drivetrain_state import Context as Context
    from drivetrain_state import ParallelDims as ParallelDims
    from drivetrain_state import StateSettings as StateSettings
    from drivetrain_state import connect as connect
    from drivetrain_state import get_logger as get_logger
    from drivetrain_state import set_seed as set_seed
    from drivetrain_state import synchronize_rng_states as synchronize_rng_states
    from drivetrain_tracking import JSONLTracker as JSONLTracker
    from drivetrain_tracking import Tracker as Tracker

# Module -> its public names.
_NAMES = {
    "drivetrain.accelerator.accelerator": "Accelerator",
    "drivetrain.early_stopping": "EarlyStopping",
    "drivetrain.plan.effective_plan": "EffectivePlan PlanMismatchError PlanRow",
    "drivetrain.probes": "find_learning_rate gradient_noise",
    "drivetrain.saving.hooks": "CheckpointHook",
    "drivetrain.settings": "RunSettings",
    "drivetrain_backends": "AccumulationError BackendRegistry BatchMismatchError DDPSettings PairingError "
    "register_backend UnknownBackendError",
    "drivetrain_checkpoint": "Checkpointer CheckpointSettings",
    "drivetrain_config": "ConfigError Layers resolve",
    "drivetrain_data": "DataSettings Shard shard_loader ShardedLoader skip_first_batches",
    "drivetrain_dispatch": "compute_module_sizes cpu_offload cpu_offload_with_hook disk_offload dispatch_model "
    "find_tied_parameters infer_auto_device_map init_empty_weights init_on_device load_checkpoint_and_dispatch "
    "load_checkpoint_in_model remove_hooks retie_parameters",
    "drivetrain_launcher": "debug_launcher notebook_launcher",
    "drivetrain_memory": "clear_device_cache find_executable_batch_size free_memory LeakDetector record_peak "
    "release_memory",
    "drivetrain_precision": "PrecisionError PrecisionSettings supported_modes",
    "drivetrain_state": "connect Context get_logger ParallelDims set_seed StateSettings synchronize_rng_states",
    "drivetrain_tracking": "JSONLTracker Tracker",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_HOMES)

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            from importlib import import_module

            return getattr(import_module(_HOMES[name]), name)
        if not name.startswith("_"):
            from drivetrain.accelerator.foreign_names import refuse_import

            refuse_import(name)
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
