"""What a command line gives: folders that must be checkpoints or hold some, and errors as one line."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from drivetrain_checkpoint.errors import CorruptCheckpointError, FolderInUseError, NoCheckpointError
from drivetrain_checkpoint.format.layout import MANIFEST, step_folders, step_of
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage import base as storage
from drivetrain_checkpoint.storage.base import Place
from drivetrain_config import ConfigError, resolve

# What the shell is told of a command that cannot be carried out, and of one that found something wrong.
USAGE = 2
WRONG = 1

DIRECTORY_HELP = "Folder of checkpoints, or its URL."
CHECKPOINT_HELP = "Folder of a checkpoint, such as runs/step-100, or its URL."

_TOLD = (
    ValueError,
    OSError,
    ImportError,
    ConfigError,
    CorruptCheckpointError,
    FolderInUseError,
    NoCheckpointError,
)

Arguments = TypeVar("Arguments")


def told(run: Callable[[Arguments], int]) -> Callable[[Arguments], int]:
    """A command of which what cannot be done is a line on stderr and the exit code 2, not a traceback."""

    @wraps(run)
    def telling(arguments: Arguments) -> int:
        try:
            return run(arguments)
        except _TOLD as error:
            text = " ".join(str(error).split())
            sys.stderr.write(f"drivetrain: error: {text}\n")
            return USAGE

    return telling


def place_of(text: str) -> Place:
    """The folder or URL that a user names; a store's options are those of the `checkpoint` section.

    Raises:
        ImportError: What its kind of URL needs is not installed.
        ValueError: It is no URL that can be known.
        NoCheckpointError: Nothing is there.
    """
    options = resolve(CheckpointSettings, section="checkpoint").value.storage_options
    place = storage.locate(text, options)
    if not storage.is_folder(place):
        raise NoCheckpointError(
            f"{place} is no folder: name a folder of checkpoints, or one of them, such as runs/step-100"
        )
    return place


def directory_of(text: str) -> Place:
    """A folder that holds checkpoints, be they good or not.

    Raises:
        NoCheckpointError: It holds none, or is one itself.
    """
    place = place_of(text)
    if storage.is_file(place / MANIFEST) or step_of(place) is not None:
        raise NoCheckpointError(f"{place} is a checkpoint: name the folder that it is in, {place.parent}")
    if not step_folders(place):
        if step_folders(place / "checkpoints"):
            raise NoCheckpointError(f"{place} holds no checkpoints itself: name {place / 'checkpoints'}")
        raise NoCheckpointError(
            f"{place} holds no checkpoints: name the folder in which step-1, step-2 and so on lie"
        )
    return place


def checkpoint_of(text: str) -> Place:
    """A folder in which there is a manifest, be it good or not.

    Raises:
        NoCheckpointError: It is none.
    """
    place = place_of(text)
    if storage.is_file(place / MANIFEST):
        return place
    if inside := step_folders(place) or step_folders(place / "checkpoints"):
        raise NoCheckpointError(f"{place} is no checkpoint but holds some: name one, such as {inside[-1]}")
    why = "a save that was never completed" if step_of(place) is not None else "no checkpoint"
    raise NoCheckpointError(
        f"{place} is {why}, for it has no {MANIFEST}: name a folder such as runs/step-100"
    )
