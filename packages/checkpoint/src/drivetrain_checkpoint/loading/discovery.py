"""Find the checkpoints of a directory: the manifest of each folder, or why the folder is not a valid checkpoint."""

from dataclasses import dataclass

from drivetrain_checkpoint.errors import CorruptCheckpointError
from drivetrain_checkpoint.format.layout import has_manifest, step_folders
from drivetrain_checkpoint.format.manifest import Manifest, check_files, read_manifest
from drivetrain_checkpoint.storage.place import Place
from drivetrain_checkpoint.storage.threads import in_threads

# A request to an object store takes tens of milliseconds, and a run may keep hundreds of checkpoints.
_MOST_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A folder with the name of a checkpoint.

    Attributes:
        folder: The path of the folder.
        committed: Whether the folder has a manifest; without one, the save was not completed.
        manifest: The manifest; None if it is missing or cannot be read.
        problem: The reason why the checkpoint is not valid; None if manifest and file sizes are correct.
    """

    folder: Place
    committed: bool
    manifest: Manifest | None
    problem: str | None

    @property
    def is_valid(self) -> bool:
        """True if manifest and file sizes are correct."""
        return self.problem is None

    @property
    def sequence(self) -> int:
        """The number of the save in the directory, counted from 1; 0 without a readable manifest."""
        return 0 if self.manifest is None else self.manifest.sequence


def find_checkpoints(directory: Place) -> tuple[CheckpointInfo, ...]:
    """Return all checkpoints of a directory, last saved first whatever the step; folders without a manifest last."""
    found = in_threads(inspect, step_folders(directory), most=_MOST_AT_ONCE)
    return tuple(sorted(found, key=lambda one: one.sequence, reverse=True))


def inspect(folder: Place) -> CheckpointInfo:
    """Check the manifest and file sizes of one folder."""
    manifest = None
    problem = None
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
    except CorruptCheckpointError as error:
        problem = str(error)
    committed = manifest is not None or has_manifest(folder)
    return CheckpointInfo(folder=folder, committed=committed, manifest=manifest, problem=problem)
