"""What a directory of checkpoints holds: each folder's manifest, or why it is no checkpoint."""

from dataclasses import dataclass

from drivetrain_checkpoint.errors import CorruptCheckpointError
from drivetrain_checkpoint.format.layout import MANIFEST, step_folders
from drivetrain_checkpoint.format.manifest import Manifest, check_files, read_manifest
from drivetrain_checkpoint.storage import base as storage
from drivetrain_checkpoint.storage.base import Place
from drivetrain_checkpoint.storage.threads import in_threads

_MOST_AT_ONCE = 8  # an object store answers in tens of milliseconds, a run keeps hundreds of checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A folder that is named as a checkpoint.

    Attributes:
        folder: Where it is.
        committed: Whether a manifest is there; without one, a save was not completed.
        manifest: What it says; None if there is none that can be read.
        problem: Why it is not valid; None if manifest and file sizes are right.
    """

    folder: Place
    committed: bool
    manifest: Manifest | None
    problem: str | None

    @property
    def is_valid(self) -> bool:
        """Whether manifest and file sizes are right."""
        return self.problem is None

    @property
    def sequence(self) -> int:
        """Its number among the saves into the directory; 0 where no manifest tells."""
        return 0 if self.manifest is None else self.manifest.sequence


def find_checkpoints(directory: Place) -> tuple[Found, ...]:
    """Every checkpoint of a directory, the last saved first, whatever its step; those without a manifest last."""
    found = in_threads(inspect, step_folders(directory), most=_MOST_AT_ONCE)
    return tuple(sorted(found, key=lambda one: one.sequence, reverse=True))


def inspect(folder: Place) -> Found:
    """Look at one folder: manifest and file sizes."""
    manifest = None
    problem = None
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
    except CorruptCheckpointError as error:
        problem = str(error)
    committed = manifest is not None or storage.is_file(folder / MANIFEST)
    return Found(folder=folder, committed=committed, manifest=manifest, problem=problem)
