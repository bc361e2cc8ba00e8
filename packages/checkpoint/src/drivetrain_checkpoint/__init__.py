"""Training checkpoints without pickle, committed by a manifest that is written last.

`Checkpointer.save` writes models, what is the same on all ranks and what each rank has of its own, as safetensors and
JSON, and leaves either a whole checkpoint or none. `Checkpointer.load` finds the newest good one and checks every
byte of it. `save_model` and `load_model` write and read a model alone, as Hugging Face's libraries do.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_checkpoint.accelerate_folder import find_accelerate_state as find_accelerate_state
    from drivetrain_checkpoint.accelerate_state import AccelerateState as AccelerateState
    from drivetrain_checkpoint.accelerate_state import read_accelerate_state as read_accelerate_state
    from drivetrain_checkpoint.checkpointer import Checkpointer as Checkpointer
    from drivetrain_checkpoint.errors import ChangedWhileCopiedError as ChangedWhileCopiedError
    from drivetrain_checkpoint.errors import CorruptCheckpointError as CorruptCheckpointError
    from drivetrain_checkpoint.errors import FolderInUseError as FolderInUseError
    from drivetrain_checkpoint.errors import FolderNotSharedError as FolderNotSharedError
    from drivetrain_checkpoint.errors import ForeignStateError as ForeignStateError
    from drivetrain_checkpoint.errors import NoCheckpointError as NoCheckpointError
    from drivetrain_checkpoint.errors import OtherRankFailedError as OtherRankFailedError
    from drivetrain_checkpoint.errors import PickleNotAllowedError as PickleNotAllowedError
    from drivetrain_checkpoint.errors import StateError as StateError
    from drivetrain_checkpoint.export import save_model as save_model
    from drivetrain_checkpoint.export import write_export as write_export
    from drivetrain_checkpoint.export import write_tensor_file as write_tensor_file
    from drivetrain_checkpoint.export_load import ExportMatch as ExportMatch
    from drivetrain_checkpoint.export_load import IncompatibleNames as IncompatibleNames
    from drivetrain_checkpoint.export_load import load_model as load_model
    from drivetrain_checkpoint.export_load import match_export as match_export
    from drivetrain_checkpoint.export_plan import ExportPlan as ExportPlan
    from drivetrain_checkpoint.export_plan import TensorInfo as TensorInfo
    from drivetrain_checkpoint.export_plan import plan_export as plan_export
    from drivetrain_checkpoint.export_plan import tied_names as tied_names
    from drivetrain_checkpoint.exported import ExportedTensors as ExportedTensors
    from drivetrain_checkpoint.exported import open_export as open_export
    from drivetrain_checkpoint.load import Loaded as Loaded
    from drivetrain_checkpoint.manifest import Manifest as Manifest
    from drivetrain_checkpoint.manifest import read_manifest as read_manifest
    from drivetrain_checkpoint.merge import merge_shards as merge_shards
    from drivetrain_checkpoint.schedule import RESUME_EXIT_CODE as RESUME_EXIT_CODE
    from drivetrain_checkpoint.schedule import Due as Due
    from drivetrain_checkpoint.schedule import SaveSchedule as SaveSchedule
    from drivetrain_checkpoint.settings import CheckpointSettings as CheckpointSettings
    from drivetrain_checkpoint.shards import FlatPart as FlatPart
    from drivetrain_checkpoint.shards import FlatShard as FlatShard
    from drivetrain_checkpoint.shards import Replica as Replica
    from drivetrain_checkpoint.survey import Found as Found
    from drivetrain_checkpoint.survey import find_checkpoints as find_checkpoints
    from drivetrain_checkpoint.tree import State as State
    from drivetrain_checkpoint.verify import Damage as Damage
    from drivetrain_checkpoint.verify import verify_checkpoint as verify_checkpoint

# Public name -> the file it stands in.
_ROOMS = {
    "PickleNotAllowedError": "errors",
    "AccelerateState": "accelerate_state",
    "RESUME_EXIT_CODE": "schedule",
    "Due": "schedule",
    "SaveSchedule": "schedule",
    "CheckpointSettings": "settings",
    "ChangedWhileCopiedError": "errors",
    "Checkpointer": "checkpointer",
    "CorruptCheckpointError": "errors",
    "Damage": "verify",
    "ExportMatch": "export_load",
    "ExportPlan": "export_plan",
    "ExportedTensors": "exported",
    "FolderInUseError": "errors",
    "FolderNotSharedError": "errors",
    "FlatPart": "shards",
    "FlatShard": "shards",
    "ForeignStateError": "errors",
    "Found": "survey",
    "IncompatibleNames": "export_load",
    "Loaded": "load",
    "Manifest": "manifest",
    "NoCheckpointError": "errors",
    "OtherRankFailedError": "errors",
    "Replica": "shards",
    "State": "tree",
    "StateError": "errors",
    "TensorInfo": "export_plan",
    "find_accelerate_state": "accelerate_folder",
    "find_checkpoints": "survey",
    "load_model": "export_load",
    "match_export": "export_load",
    "merge_shards": "merge",
    "open_export": "exported",
    "plan_export": "export_plan",
    "read_accelerate_state": "accelerate_state",
    "read_manifest": "manifest",
    "save_model": "export",
    "tied_names": "export_plan",
    "verify_checkpoint": "verify",
    "write_export": "export",
    "write_tensor_file": "export",
}
__all__ = [
    "RESUME_EXIT_CODE",
    "AccelerateState",
    "ChangedWhileCopiedError",
    "CheckpointSettings",
    "Checkpointer",
    "CorruptCheckpointError",
    "Damage",
    "Due",
    "ExportMatch",
    "ExportPlan",
    "ExportedTensors",
    "FlatPart",
    "FlatShard",
    "FolderInUseError",
    "FolderNotSharedError",
    "ForeignStateError",
    "Found",
    "IncompatibleNames",
    "Loaded",
    "Manifest",
    "NoCheckpointError",
    "OtherRankFailedError",
    "PickleNotAllowedError",
    "Replica",
    "SaveSchedule",
    "State",
    "StateError",
    "TensorInfo",
    "find_accelerate_state",
    "find_checkpoints",
    "load_model",
    "match_export",
    "merge_shards",
    "open_export",
    "plan_export",
    "read_accelerate_state",
    "read_manifest",
    "save_model",
    "tied_names",
    "verify_checkpoint",
    "write_export",
    "write_tensor_file",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        from importlib import import_module

        return getattr(import_module(f"drivetrain_checkpoint.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'drivetrain_checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
