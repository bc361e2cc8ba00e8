"""The import of a platform's library, which is optional: a missing one is named with the extra that brings it."""

from importlib import import_module
from types import ModuleType

from drivetrain_tracking.errors import MissingLibraryError


def load_library(module: str, *, extra: str) -> ModuleType:
    """Import a platform's library."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the library is there, and lacks something itself
        raise MissingLibraryError(missing_library(module.partition(".")[0], extra)) from None


def missing_library(library: str, extra: str) -> str:
    """Return the message of a library that is not installed."""
    return (
        f"the tracker {extra!r} needs the library {library!r}, which is not installed: "
        f"pip install 'drivetrain-tracking[{extra}]'"
    )
