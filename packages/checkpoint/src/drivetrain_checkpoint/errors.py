"""What can go wrong with a checkpoint, as exceptions that name the file or the value and the way out."""


class StateError(ValueError):
    """A state holds something that no checkpoint can hold; the message names its path and type."""


class ChangedWhileCopiedError(RuntimeError):
    """A tensor changed before a save in the background had copied it, outside the steps that the save knows of."""


class CorruptCheckpointError(RuntimeError):
    """A checkpoint is not what was written: a file is missing, too short or changed; the message names it."""


class NoCheckpointError(RuntimeError):
    """There is nothing to load where a checkpoint was looked for."""


class OtherRankFailedError(RuntimeError):
    """Another rank failed, so this one gave up too; the message holds that rank's error."""


class FolderNotSharedError(RuntimeError):
    """The ranks do not see the same folder: it lies on a disk of one host."""


class FolderInUseError(RuntimeError):
    """Another run writes into the same folder; the message says which process on which host."""


class ForeignStateError(ValueError):
    """What another library saved is in a form that is not taken over; the message names the file and a way out."""


class PickleNotAllowedError(RuntimeError):
    """A checkpoint holds a pickle, whose loading runs code, and nobody has allowed that."""
