"""Unify the errors of object stores: their libraries raise dozens of types, few with the URL, not all an OSError."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upath import UPath

_KINDS = (FileNotFoundError, PermissionError, OSError)


@contextmanager
def as_os_error(path: "UPath") -> Generator[None]:
    """Run the block and turn any exception into an `OSError` that names the URL.

    Raises:
        FileNotFoundError: An object or bucket does not exist.
        PermissionError: The credentials do not allow the operation.
        OSError: The block raised another exception.
    """
    try:
        yield
    except Exception as error:
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), OSError)
        raise kind(f"{path}: {error or type(error).__name__}") from error
