"""Check the folders and URLs given on the command line, and report errors as one line."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from drivetrain_checkpoint.errors import CheckpointLockedError, CorruptCheckpointError, NoCheckpointError
from drivetrain_checkpoint.format.layout import MANIFEST, has_manifest, step_folders, step_of
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage.place import Place, locate, storage_of
from drivetrain_config import ConfigError, resolve

# The exit codes of a command that cannot run, and of one that has found damage or could not finish.
USAGE = 2
WRONG = 1

_REPORTED = (
    ValueError,
    OSError,
    ImportError,
    ConfigError,
    CorruptCheckpointError,
    CheckpointLockedError,
    NoCheckpointError,
)

Arguments = TypeVar("Arguments")


def report_errors(run: Callable[[Arguments], int]) -> Callable[[Arguments], int]:
    """Wrap a command: an error prints one line on stderr instead of a traceback, and the exit code is 2."""

    @wraps(run)
    def report(arguments: Arguments) -> int:
        try:
            return run(arguments)
        except _REPORTED as error:
            text = " ".join(str(error).split())
            sys.stderr.write(f"drivetrain: error: {text}\n")
            return USAGE

    return report


def place_of(text: str) -> Place:
    """Return the place of a folder or URL, with the storage options of the `checkpoint` section."""
    options = resolve(CheckpointSettings, section="checkpoint").value.storage_options
    place = locate(text, options)
    if not storage_of(place).is_folder(place):
        raise NoCheckpointError(
            f"{place} is no folder: name a folder of checkpoints, or a checkpoint, such as runs/step-100"
        )
    return place


def directory_of(text: str) -> Place:
    """Return the place of a folder that holds checkpoints, valid or not."""
    place = place_of(text)
    if has_manifest(place) or step_of(place) is not None:
        raise NoCheckpointError(f"{place} is a checkpoint: name the folder that it is in, {place.parent}")
    if not step_folders(place):
        if step_folders(place / "checkpoints"):
            raise NoCheckpointError(f"{place} holds no checkpoints itself: name {place / 'checkpoints'}")
        raise NoCheckpointError(
            f"{place} holds no checkpoints: name the folder in which step-1, step-2 and so on lie"
        )
    return place


def checkpoint_of(text: str) -> Place:
    """Return the place of a folder that has a manifest, valid or not."""
    place = place_of(text)
    if has_manifest(place):
        return place
    if inside := step_folders(place) or step_folders(place / "checkpoints"):
        raise NoCheckpointError(f"{place} is no checkpoint but holds some: name one, such as {inside[-1]}")
    why = "a save that was never completed" if step_of(place) is not None else "no checkpoint"
    raise NoCheckpointError(
        f"{place} is {why}, for it has no {MANIFEST}: name a folder such as runs/step-100"
    )
