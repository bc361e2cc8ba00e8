"""An object store behind a URL, by fsspec: no rename, no folders, and nothing is there until it is whole."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain_checkpoint.storage import s3
from drivetrain_checkpoint.storage.errors import told
from drivetrain_checkpoint.storage.uploads import S3Upload, StreamedUpload

if TYPE_CHECKING:
    from upath import UPath


def locate(url: str, options: Mapping[str, Any]) -> "UPath":
    """The place of a URL.

    Raises:
        ImportError: What it needs is not installed; the message names it.
        ValueError: Its protocol is not known to fsspec.
    """
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
    except (
        ImportError,
        ValueError,
    ) as error:  # its message names the package, as in "Install s3fs to access S3"
        raise type(error)(f"{url}: {error}") from error
    return UPath(f"{protocol}://{rest.rstrip('/')}", **options)


class RemoteReader:
    """An object that is read at places: each piece is a request, and several are worth having on their way.

    Args:
        path: Where.

    Attributes:
        size_bytes: None: that would be a request more, and the listing of the folder has told.
        num_readers: How many requests are worth having on their way.
    """

    size_bytes = None
    num_readers = 8

    def __init__(self, path: "UPath") -> None:
        self._path = path

    def read_at(self, start: int, views: Sequence[memoryview]) -> int:
        """Fill buffers one after the other from a place on; how many bytes there were."""
        with told(self._path):
            fs: Any = self._path.fs
            content: bytes = fs.cat_file(self._path.path, start=start, end=start + sum(map(len, views)))
        rest = memoryview(content)
        for view in views:
            piece, rest = rest[: len(view)], rest[len(view) :]
            view[: len(piece)] = piece
        return len(content)

    def close(self) -> None:
        """Nothing is open."""


def create(path: "UPath") -> S3Upload | StreamedUpload:
    """A new object."""
    return S3Upload(path) if s3.is_s3(path.fs) else StreamedUpload(path)


def make_ready(folder: "UPath") -> None:
    """Give up what a killed process left half uploaded below a prefix; a folder is nothing that can be made.

    Raises:
        FileNotFoundError: There is no such bucket.
    """
    if s3.is_s3(folder.fs):
        with told(folder):
            s3.abort_uploads(folder.fs, folder.path)


def put(path: "UPath", content: bytes) -> None:
    """Have an object appear, or replace one: a store does that in one piece."""
    with told(path):
        path.fs.pipe_file(path.path, content)


def read_whole(path: "UPath", *, most_bytes: int) -> bytes:
    """Return an object's content, as it is now.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It holds more than `most_bytes`.
    """
    with told(path):
        fs: Any = path.fs
        fs.invalidate_cache(path.path)
        content = fs.cat_file(path.path, start=0, end=most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it holds more than the {most_bytes} bytes that are read")
    return content


def sizes_in(folder: "UPath") -> dict[str, int]:
    """The objects right below a prefix with their sizes in bytes: one listing, never a remembered one."""
    return {name: entry["size"] for name, entry in _list(folder).items() if entry["type"] == "file"}


def folders_in(directory: "UPath") -> list[str]:
    """The names of the prefixes right below one."""
    return [name for name, entry in _list(directory).items() if entry["type"] == "directory"]


def holds_anything(folder: "UPath") -> bool:
    """Whether there is anything below a prefix."""
    return bool(_list(folder))


def sees(folder: "UPath") -> bool:
    """Whether this process may look into the store; there is no folder yet that could be seen.

    Raises:
        OSError: It may not, or does not reach it.
    """
    _list(folder)
    return True


def remove(path: "UPath") -> None:
    """Delete an object."""
    with told(path):
        path.fs.rm_file(path.path)


def _list(folder: "UPath") -> dict[str, dict[str, Any]]:
    """What lies right below a prefix, by name.

    Raises:
        FileNotFoundError: There is no such bucket.
    """
    with told(folder):
        folder.fs.invalidate_cache(folder.path)
        try:
            entries: list[dict[str, Any]] = folder.fs.ls(folder.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            if s3.is_s3(folder.fs):
                s3.check_bucket(folder.fs, folder.path)
            return {}
    below = folder.path.rstrip("/") + "/"
    return {
        entry["name"].removeprefix(below).rstrip("/"): entry
        for entry in entries
        if entry["name"].startswith(below) and entry["name"] != below
    }
