"""Access the storage of checkpoints: the only module that distinguishes a local disk from an object store.

A place is a `Path`, or for a URL such as `s3://bucket/run` a `UPath`, which joins and prints like a `Path`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

from drivetrain_checkpoint.storage import local as disk
from drivetrain_checkpoint.storage import remote
from drivetrain_checkpoint.storage.direct_writer import DiskWriter
from drivetrain_checkpoint.storage.local import DiskReader

if TYPE_CHECKING:
    from upath import UPath

Place: TypeAlias = Union[Path, "UPath"]

# The largest file to read in one piece: the manifest of a thousand ranks and ten thousand tensors fits.
MOST_BYTES = 2**30

_ON_DISK = ("file", "local")
_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


class Writer(Protocol):
    """A writer of a new file: call `write` repeatedly, `finish`, then `close`; `close` without `finish` aborts."""

    def write(self, data: memoryview) -> None:
        """Append `data`, which may be changed afterwards."""
        ...

    def finish(self) -> None:
        """Make the file complete and durable."""
        ...

    def close(self) -> None:
        """Close the file. An unfinished file is not valid, and an object store keeps none of it."""
        ...


class Reader(Protocol):
    """A reader of a file at any offset, by up to `num_readers` threads at once."""

    @property
    def num_readers(self) -> int:
        """The number of threads beyond which reads do not get faster."""
        ...

    @property
    def size_bytes(self) -> int | None:
        """The size of the file in bytes; None if unknown after opening."""
        ...

    def read_at(self, start: int, views: Sequence[memoryview]) -> int:
        """Fill buffers in order from byte `start` on, and return the number of bytes read."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


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
            raise ValueError(f"{str(where)!r}: a Path takes a slash from a URL; give the URL as text")
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
    """Return the path that a user gives where a URL is not supported.

    Raises:
        ValueError: `where` is a URL.
    """
    if "://" in str(where) or _LOST_SLASH.match(Path(where).as_posix()):
        raise ValueError(f"{str(where)!r}: must be a folder; copy from or to the store with its own tool")
    return Path(where)


def make_folder(folder: Place) -> None:
    """Prepare a folder for writing; create it on a disk."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
    else:
        remote.make_ready(folder)


def create(path: Place) -> Writer:
    """Create a new file and return its writer."""
    return DiskWriter(path) if isinstance(path, Path) else remote.create(path)


def open_to_read(path: Place) -> Reader:
    """Open an existing file and return its reader.

    Raises:
        FileNotFoundError: The file does not exist; for an object store, the first read may raise this instead.
    """
    return DiskReader(path) if isinstance(path, Path) else remote.RemoteReader(path)


def put(path: Place, content: bytes) -> None:
    """Create or replace a file atomically; it is durable when this returns.

    A reader sees either the old content or the new. Everything else in the folder becomes durable first.
    """
    return disk.put(path, content) if isinstance(path, Path) else remote.put(path, content)


def read_whole(path: Place, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        FileNotFoundError: The file does not exist.
        IsADirectoryError: The path is a folder.
        ValueError: The path is a pipe, a socket or a device, or the file holds more than `most_bytes`.
    """
    if isinstance(path, Path):
        return disk.read_whole(path, most_bytes=most_bytes)
    return remote.read_whole(path, most_bytes=most_bytes)


def sizes_in(folder: Place) -> dict[str, int]:
    """Return the current sizes in bytes of the files in a folder, by name; empty if the folder does not exist."""
    return disk.sizes_in(folder) if isinstance(folder, Path) else remote.sizes_in(folder)


def folders_in(directory: Place) -> list[str]:
    """Return the names of the folders in a directory; empty if the directory does not exist."""
    return disk.folders_in(directory) if isinstance(directory, Path) else remote.folders_in(directory)


def is_file(path: Place) -> bool:
    """Return whether a file exists."""
    return path.is_file() if isinstance(path, Path) else path.name in remote.sizes_in(path.parent)


def is_folder(folder: Place) -> bool:
    """Return whether a folder exists, or any object below a prefix."""
    return folder.is_dir() if isinstance(folder, Path) else remote.holds_anything(folder)


def sees(folder: Place) -> bool:
    """Return whether this process sees a folder that another one made; in an object store, whether it may list it."""
    return disk.sees(folder) if isinstance(folder, Path) else remote.sees(folder)


def remove(paths: Iterable[Place]) -> None:
    """Delete files, which must exist."""
    for path in paths:
        if isinstance(path, Path):
            path.unlink()
        else:
            remote.remove(path)


def remove_folder(folder: Place) -> None:
    """Delete an empty folder; an object store has none."""
    if isinstance(folder, Path):
        disk.remove_folder(folder)
