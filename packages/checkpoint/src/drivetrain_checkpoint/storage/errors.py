"""Errors of object stores, in one kind: their libraries raise dozens, many of them no OSError, few with the URL."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upath import UPath

_KINDS = (FileNotFoundError, PermissionError, OSError)


@contextmanager
def told(path: "UPath") -> Generator[None]:
    """Turn whatever is raised inside into an OSError that names the URL.

    Raises:
        FileNotFoundError: Something is not there.
        PermissionError: The credentials do not allow it.
        OSError: Anything else.
    """
    try:
        yield
    except Exception as error:
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), OSError)
        raise kind(f"{path}: {error or type(error).__name__}") from error
