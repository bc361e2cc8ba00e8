"""The places of checkpoints and their storage. Only this module tells a local disk from an object store.

A place is a `Path`, or for a URL such as `s3://bucket/run` a `UPath`, which joins and prints like a `Path`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from drivetrain_checkpoint.storage import local, remote
from drivetrain_checkpoint.storage.protocol import Storage

if TYPE_CHECKING:
    from upath import UPath

Place: TypeAlias = Union[Path, "UPath"]

_ON_DISK = ("file", "local")
_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


def storage_of(place: Place) -> Storage[Any]:
    """Return the storage of a place: the local disk for a `Path`, the object store for a `UPath`."""
    return local if isinstance(place, Path) else remote


def locate(where: Place | str, options: Mapping[str, Any] | None = None) -> Place:
    """Return the place of a folder or URL that a user gives.

    Args:
        where: A folder, or an fsspec URL.
        options: The options of the URL's file system, such as credentials and an endpoint.

    Raises:
        ImportError: A package that the URL needs is not installed; the message names it.
        TypeError: `where` is neither text nor a path.
        ValueError: The URL's protocol is unknown, or `where` is a `Path` made from a URL.
    """
    if isinstance(where, Path):
        if _LOST_SLASH.match(where.as_posix()):
            raise ValueError(f"{str(where)!r}: a Path drops a slash of a URL; pass the URL as a str")
        return where.expanduser().absolute()
    if not isinstance(where, str):
        if not hasattr(where, "protocol"):
            raise TypeError(f"{where!r}: a folder or a URL is allowed, as text or as a path")
        return locate(where.path) if where.protocol in _ON_DISK else where
    protocol, separator, rest = where.partition("://")
    if not separator:
        return locate(Path(where))
    return Path(rest).absolute() if protocol in _ON_DISK else remote.locate(where, options or {})


def on_disk(where: Path | str) -> Path:
    """Return the path of a folder or file that a user gives; a URL is not supported here.

    Raises:
        ValueError: `where` is a URL.
    """
    if "://" in str(where) or _LOST_SLASH.match(Path(where).as_posix()):
        raise ValueError(f"{str(where)!r}: must be a folder; copy from or to the store with its own tool")
    return Path(where)
