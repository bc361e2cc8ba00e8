"""The base of media. A medium stores itself in a folder once, before any platform gets it."""

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from drivetrain_tracking.errors import MissingLibraryError, ValueNotLoggableError
from drivetrain_tracking.values.records import MediaKind, StoredMedium


class Medium(ABC):
    """A value to log other than a number. Its content is stored when logged, and not kept in memory."""

    @abstractmethod
    def store(self, stem: Path) -> StoredMedium:
        """Store the content.

        Args:
            stem: The path of the file to write, without its suffix; its folder exists.

        Raises:
            ValueNotLoggableError: The content has another type or shape; the message says which are allowed.
            MissingLibraryError: A library that encodes the content is not installed.
        """


def as_array(data: Any, what: str) -> Any:
    """Return the content of a tensor, array or nested list as a NumPy array on the host."""
    numpy = media_library("numpy")
    host = data.detach().cpu() if hasattr(data, "detach") else data  # a tensor of torch
    if str(getattr(host, "dtype", "")) == "torch.bfloat16":  # which NumPy lacks
        host = host.float()
    array = numpy.asarray(host)
    if array.dtype.kind not in "buif":
        raise ValueNotLoggableError(f"{what}({type(data).__name__}): holds no numbers but {array.dtype}")
    return array


def media_library(name: str) -> Any:
    """Import a library that encodes media."""
    from importlib import import_module

    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise MissingLibraryError(
            f"media of arrays need {name}, which is not installed: pip install 'drivetrain-tracking[media]'"
        ) from None


def copied(source: Path, stem: Path, kind: MediaKind, caption: str) -> StoredMedium:
    """Return a medium whose file is a copy of the user's file."""
    if not source.is_file():
        raise ValueNotLoggableError(f"{kind} {str(source)!r}: there is no such file")
    path = stem.with_name(stem.name + source.suffix)
    shutil.copyfile(source, path)
    return StoredMedium(kind=kind, path=path, caption=caption)
