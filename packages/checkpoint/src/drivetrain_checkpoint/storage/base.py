"""Where checkpoints are kept: the one place that tells a local disk from an object store.

A place is a `Path`, or for a URL such as `s3://bucket/run` a `UPath`, which joins and prints like one.
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

# What a file may hold that is read in one piece: the manifest of a thousand ranks and ten thousand tensors fits.
MOST_BYTES = 2**30

_ON_DISK = ("file", "local")
_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


class Writer(Protocol):
    """A new file: `write` as often as needed, `finish`, then `close`; closed before it is finished it is given up."""

    def write(self, data: memoryview) -> None:
        """Append to it; `data` may be changed afterwards."""
        ...

    def finish(self) -> None:
        """Make it whole and durable."""
        ...

    def close(self) -> None:
        """Let go of it. What is not finished is worth nothing, and an object store keeps none of it."""
        ...


class Reader(Protocol):
    """A file that is read at places, by `num_readers` threads at once; None as its size: it was not asked for."""

    @property
    def num_readers(self) -> int:
        """How many threads are worth reading with."""
        ...

    @property
    def size_bytes(self) -> int | None:
        """The file's size, if opening it told."""
        ...

    def read_at(self, start: int, views: Sequence[memoryview]) -> int:
        """Fill buffers one after the other from a place on; how many bytes there were."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


def locate(where: Place | str, options: Mapping[str, Any] | None = None) -> Place:
    """The place that a user means.

    Args:
        where: A folder, or a URL as fsspec knows them.
        options: For the URL's file system, such as credentials and an endpoint.

    Raises:
        ImportError: What its kind of URL needs is not installed; the message names it.
        TypeError: It is no path and no URL at all.
        ValueError: It is no path and no URL that can be known.
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
    """The folder that a user means where a URL will not do.

    Raises:
        ValueError: It is a URL.
    """
    if "://" in str(where) or _LOST_SLASH.match(Path(where).as_posix()):
        raise ValueError(f"{str(where)!r}: must be a folder; copy from or to the store with its own tool")
    return Path(where)


def make_folder(folder: Place) -> None:
    """Make ready to write into a folder."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
    else:
        remote.make_ready(folder)


def create(path: Place) -> Writer:
    """A new file."""
    return DiskWriter(path) if isinstance(path, Path) else remote.create(path)


def open_to_read(path: Place) -> Reader:
    """A file that is there.

    Raises:
        FileNotFoundError: It is not; an object store may say so only when it is read.
    """
    return DiskReader(path) if isinstance(path, Path) else remote.RemoteReader(path)


def put(path: Place, content: bytes) -> None:
    """Have a file appear, or replace one, in one piece; it is durable when this returns.

    A reader sees the old content or the new. Everything else in the folder is durable before it.
    """
    return disk.put(path, content) if isinstance(path, Path) else remote.put(path, content)


def read_whole(path: Place, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return a file's content.

    Raises:
        FileNotFoundError: There is no such file.
        IsADirectoryError: It is a folder.
        ValueError: It is a pipe or a device, or holds more than `most_bytes`.
    """
    if isinstance(path, Path):
        return disk.read_whole(path, most_bytes=most_bytes)
    return remote.read_whole(path, most_bytes=most_bytes)


def sizes_in(folder: Place) -> dict[str, int]:
    """The files of a folder with their sizes in bytes, as they are now; none if it is not there."""
    return disk.sizes_in(folder) if isinstance(folder, Path) else remote.sizes_in(folder)


def folders_in(directory: Place) -> list[str]:
    """The names of the folders in a directory; none if it is not there."""
    return disk.folders_in(directory) if isinstance(directory, Path) else remote.folders_in(directory)


def is_file(path: Place) -> bool:
    """Whether there is such a file."""
    return path.is_file() if isinstance(path, Path) else path.name in remote.sizes_in(path.parent)


def is_folder(folder: Place) -> bool:
    """Whether there is such a folder, or anything under such a prefix."""
    return folder.is_dir() if isinstance(folder, Path) else remote.holds_anything(folder)


def sees(folder: Place) -> bool:
    """Whether this process can see what another has put into a folder."""
    return disk.sees(folder) if isinstance(folder, Path) else remote.sees(folder)


def remove(paths: Iterable[Place]) -> None:
    """Delete files that are there."""
    for path in paths:
        if isinstance(path, Path):
            path.unlink()
        else:
            remote.remove(path)


def remove_folder(folder: Place) -> None:
    """Delete a folder that holds nothing any more, where there are such things."""
    if isinstance(folder, Path):
        disk.remove_folder(folder)
