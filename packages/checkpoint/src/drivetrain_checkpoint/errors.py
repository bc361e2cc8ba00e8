"""The exceptions of checkpoints; their messages name the file or value and the fix."""

from drivetrain_state import OtherRankFailedError as OtherRankFailedError


class StateError(ValueError):
    """A state holds a value that a checkpoint cannot store; the message names its path and type."""


class ChangedWhileCopiedError(RuntimeError):
    """A tensor changed outside the optimizer step, before a background save had copied it."""


class CorruptCheckpointError(RuntimeError):
    """A checkpoint is damaged: a file is missing, truncated or changed; the message names it."""


class NoCheckpointError(RuntimeError):
    """A path holds no checkpoint to load."""


class FolderNotSharedError(RuntimeError):
    """The ranks do not see the same folder: it is on a disk local to one host."""


class CheckpointLockedError(RuntimeError):
    """Another run writes into the same folder; the message names its process and host."""


class ForeignStateError(ValueError):
    """A state saved by another library has an unsupported form; the message names the file and a fix."""


class PickleNotAllowedError(RuntimeError):
    """A checkpoint holds a pickle, which runs code when loaded, and pickles are not allowed."""
