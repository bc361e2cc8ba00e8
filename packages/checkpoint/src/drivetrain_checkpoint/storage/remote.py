"""The storage in an object store, through fsspec: no renames and no folders; an object appears when complete."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain_checkpoint.storage.protocol import MOST_BYTES
from drivetrain_checkpoint.storage.uploads import (
    S3Upload,
    StreamedUpload,
    abort_uploads,
    as_os_error,
    check_bucket,
    is_s3,
)

if TYPE_CHECKING:
    from upath import UPath


def locate(url: str, options: Mapping[str, Any]) -> "UPath":
    """Return the place of a URL."""
    try:
        from fsspec import get_filesystem_class
        from upath import UPath
    except ImportError as error:
        raise ImportError(
            f"{url}: a URL needs fsspec and universal_pathlib: pip install 'drivetrain-checkpoint[remote]'"
        ) from error
    protocol, _, rest = url.partition("://")
    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:  # names the missing package, as in "Install s3fs to access S3"
        raise type(error)(f"{url}: {error}") from error
    return UPath(f"{protocol}://{rest.rstrip('/')}", **options)


class RemoteReader:
    """A reader of an object at any offset; each read is one request, and opening needs no request."""

    size_bytes = None  # would take another request, and the listing of the folder has given it
    num_readers = 8

    def __init__(self, path: "UPath") -> None:
        self._path = path

    def read_at(self, start: int, views: Sequence[memoryview]) -> int:
        """Fill buffers in order from byte `start` on, and return the number of bytes read."""
        with as_os_error(self._path):
            fs: Any = self._path.fs
            content: bytes = fs.cat_file(self._path.path, start=start, end=start + sum(map(len, views)))
        rest = memoryview(content)
        for view in views:
            piece, rest = rest[: len(view)], rest[len(view) :]
            view[: len(piece)] = piece
        return len(content)

    def close(self) -> None:
        """Do nothing: no connection is held open."""


open_to_read = RemoteReader


def make_folder(folder: "UPath") -> None:
    """Abort the uploads that a killed process left below a prefix; `FileNotFoundError` if there is no such bucket."""
    if is_s3(folder.fs):
        with as_os_error(folder):
            abort_uploads(folder.fs, folder.path)


def create(path: "UPath") -> S3Upload | StreamedUpload:
    """Create a new object and return its writer."""
    return S3Upload(path) if is_s3(path.fs) else StreamedUpload(path)


def put(path: "UPath", content: bytes) -> None:
    """Create or replace an object, which a store does atomically."""
    with as_os_error(path):
        path.fs.pipe_file(path.path, content)


def read_whole(path: "UPath", *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the current content of an object, never a cached copy."""
    with as_os_error(path):
        fs: Any = path.fs
        fs.invalidate_cache(path.path)
        content = fs.cat_file(path.path, start=0, end=most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it holds more than the {most_bytes} bytes that are read")
    return content


def sizes_in(folder: "UPath") -> dict[str, int]:
    """Return the sizes in bytes of the objects directly below a prefix, by name, from one listing without a cache."""
    return {name: entry["size"] for name, entry in _list(folder).items() if entry["type"] == "file"}


def folders_in(directory: "UPath") -> list[str]:
    """Return the names of the prefixes directly below a prefix."""
    return [name for name, entry in _list(directory).items() if entry["type"] == "directory"]


def sees(folder: "UPath") -> bool:
    """Return True if this process can list the store. A store has no empty folders, so the folder is not checked.

    Raises:
        OSError: This process lacks the permission, or cannot reach the store.
    """
    _list(folder)
    return True


def is_folder(folder: "UPath") -> bool:
    """Return whether any object lies below a prefix."""
    return bool(_list(folder))


def remove(paths: Iterable["UPath"]) -> None:
    """Delete objects, which must exist."""
    for path in paths:
        with as_os_error(path):
            path.fs.rm_file(path.path)


def remove_folder(folder: "UPath") -> None:
    """Do nothing: a prefix without objects does not exist."""
    del folder


def _list(folder: "UPath") -> dict[str, dict[str, Any]]:
    """List the entries directly below a prefix, by name."""
    with as_os_error(folder):
        folder.fs.invalidate_cache(folder.path)
        try:
            entries: list[dict[str, Any]] = folder.fs.ls(folder.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            if is_s3(folder.fs):
                check_bucket(folder.fs, folder.path)
            return {}
    below = folder.path.rstrip("/") + "/"
    return {
        entry["name"].removeprefix(below).rstrip("/"): entry
        for entry in entries
        if entry["name"].startswith(below) and entry["name"] != below
    }
