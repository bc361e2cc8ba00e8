"""Training checkpoints without pickle, committed by a manifest that is written last.

`Checkpointer.save` writes models, replicated states and per-rank states as safetensors and JSON, and leaves either a
complete checkpoint or none. `Checkpointer.load` finds the newest valid checkpoint and verifies every byte it reads.
`save_model` and `load_model` write and read a model alone, in the layout of Hugging Face's libraries.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_checkpoint.checkpointer import Checkpointer as Checkpointer
    from drivetrain_checkpoint.errors import ChangedWhileCopiedError as ChangedWhileCopiedError
    from drivetrain_checkpoint.errors import CheckpointLockedError as CheckpointLockedError
    from drivetrain_checkpoint.errors import CorruptCheckpointError as CorruptCheckpointError
    from drivetrain_checkpoint.errors import FolderNotSharedError as FolderNotSharedError
    from drivetrain_checkpoint.errors import ForeignStateError as ForeignStateError
    from drivetrain_checkpoint.errors import NoCheckpointError as NoCheckpointError
    from drivetrain_checkpoint.errors import OtherRankFailedError as OtherRankFailedError
    from drivetrain_checkpoint.errors import PickleNotAllowedError as PickleNotAllowedError
    from drivetrain_checkpoint.errors import StateError as StateError
    from drivetrain_checkpoint.export.export_plan import ExportPlan as ExportPlan
    from drivetrain_checkpoint.export.export_plan import TensorInfo as TensorInfo
    from drivetrain_checkpoint.export.export_plan import plan_export as plan_export
    from drivetrain_checkpoint.export.load import ExportMatch as ExportMatch
    from drivetrain_checkpoint.export.load import IncompatibleNames as IncompatibleNames
    from drivetrain_checkpoint.export.load import load_model as load_model
    from drivetrain_checkpoint.export.load import match_export as match_export
    from drivetrain_checkpoint.export.merge import merge_shards as merge_shards
    from drivetrain_checkpoint.export.reader import ExportedTensors as ExportedTensors
    from drivetrain_checkpoint.export.reader import open_export as open_export
    from drivetrain_checkpoint.export.writer import save_model as save_model
    from drivetrain_checkpoint.export.writer import write_export as write_export
    from drivetrain_checkpoint.export.writer import write_tensor_file as write_tensor_file
    from drivetrain_checkpoint.format.manifest import Manifest as Manifest
    from drivetrain_checkpoint.format.manifest import read_manifest as read_manifest
    from drivetrain_checkpoint.format.shards import BoxedShard as BoxedShard
    from drivetrain_checkpoint.format.shards import FlatShard as FlatShard
    from drivetrain_checkpoint.format.shards import HeldBoxes as HeldBoxes
    from drivetrain_checkpoint.format.shards import HeldRange as HeldRange
    from drivetrain_checkpoint.format.shards import Proportional as Proportional
    from drivetrain_checkpoint.format.shards import Replicated as Replicated
    from drivetrain_checkpoint.format.state_tree import StateTree as StateTree
    from drivetrain_checkpoint.interop.accelerate.folder import find_accelerate_state as find_accelerate_state
    from drivetrain_checkpoint.interop.accelerate.state import AccelerateState as AccelerateState
    from drivetrain_checkpoint.interop.accelerate.state import read_accelerate_state as read_accelerate_state
    from drivetrain_checkpoint.loading.collective_load import LoadResult as LoadResult
    from drivetrain_checkpoint.loading.discovery import CheckpointInfo as CheckpointInfo
    from drivetrain_checkpoint.loading.discovery import find_checkpoints as find_checkpoints
    from drivetrain_checkpoint.loading.verify import CorruptRange as CorruptRange
    from drivetrain_checkpoint.loading.verify import verify_checkpoint as verify_checkpoint
    from drivetrain_checkpoint.saving.schedule import RESUME_EXIT_CODE as RESUME_EXIT_CODE
    from drivetrain_checkpoint.saving.schedule import SaveReason as SaveReason
    from drivetrain_checkpoint.saving.schedule import SaveSchedule as SaveSchedule
    from drivetrain_checkpoint.settings import CheckpointSettings as CheckpointSettings

# Module -> its public names.
_NAMES = {
    "checkpointer": "Checkpointer",
    "errors": "ChangedWhileCopiedError CheckpointLockedError CorruptCheckpointError FolderNotSharedError "
    "ForeignStateError NoCheckpointError OtherRankFailedError PickleNotAllowedError StateError",
    "export.export_plan": "ExportPlan plan_export TensorInfo",
    "export.load": "ExportMatch IncompatibleNames load_model match_export",
    "export.merge": "merge_shards",
    "export.reader": "ExportedTensors open_export",
    "export.writer": "save_model write_export write_tensor_file",
    "format.manifest": "Manifest read_manifest",
    "format.shards": "BoxedShard FlatShard HeldBoxes HeldRange Proportional Replicated",
    "format.state_tree": "StateTree",
    "interop.accelerate.folder": "find_accelerate_state",
    "interop.accelerate.state": "AccelerateState read_accelerate_state",
    "loading.collective_load": "LoadResult",
    "loading.discovery": "CheckpointInfo find_checkpoints",
    "loading.verify": "CorruptRange verify_checkpoint",
    "saving.schedule": "RESUME_EXIT_CODE SaveReason SaveSchedule",
    "settings": "CheckpointSettings",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
