"""Training checkpoints without pickle, committed by a manifest that is written last.

`Checkpointer.save` writes models, what is the same on all ranks and what each rank has of its own, as safetensors and
JSON, and leaves either a whole checkpoint or none. `Checkpointer.load` finds the newest good one and checks every
byte of it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_checkpoint.checkpointer import Checkpointer as Checkpointer
    from drivetrain_checkpoint.errors import CorruptCheckpointError as CorruptCheckpointError
    from drivetrain_checkpoint.errors import FolderNotSharedError as FolderNotSharedError
    from drivetrain_checkpoint.errors import NoCheckpointError as NoCheckpointError
    from drivetrain_checkpoint.errors import RankFailedError as RankFailedError
    from drivetrain_checkpoint.errors import StateError as StateError
    from drivetrain_checkpoint.load import Loaded as Loaded
    from drivetrain_checkpoint.manifest import Manifest as Manifest
    from drivetrain_checkpoint.manifest import read_manifest as read_manifest
    from drivetrain_checkpoint.settings import CheckpointSettings as CheckpointSettings
    from drivetrain_checkpoint.survey import Found as Found
    from drivetrain_checkpoint.survey import find_checkpoints as find_checkpoints
    from drivetrain_checkpoint.tree import State as State

# Public name -> the file it stands in.
_ROOMS = {
    "CheckpointSettings": "settings",
    "Checkpointer": "checkpointer",
    "CorruptCheckpointError": "errors",
    "FolderNotSharedError": "errors",
    "Found": "survey",
    "Loaded": "load",
    "Manifest": "manifest",
    "NoCheckpointError": "errors",
    "RankFailedError": "errors",
    "State": "tree",
    "StateError": "errors",
    "find_checkpoints": "survey",
    "read_manifest": "manifest",
}
__all__ = [
    "CheckpointSettings",
    "Checkpointer",
    "CorruptCheckpointError",
    "FolderNotSharedError",
    "Found",
    "Loaded",
    "Manifest",
    "NoCheckpointError",
    "RankFailedError",
    "State",
    "StateError",
    "find_checkpoints",
    "read_manifest",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        from importlib import import_module

        return getattr(import_module(f"drivetrain_checkpoint.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'drivetrain_checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
