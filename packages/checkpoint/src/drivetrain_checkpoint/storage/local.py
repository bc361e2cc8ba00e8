"""A local disk: files that are read at places, one that appears in one piece, and folders."""

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path


class DiskReader:
    """A file that is read in large pieces, at places.

    Args:
        path: Where.

    Attributes:
        path: Where.
        size_bytes: Its size.
        num_readers: Two: one hashes, and finds memory to read into, while the other waits for the disk.
    """

    num_readers = 2

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as opened:
            self._files = [
                opened.enter_context(path.open("rb", buffering=0)) for _ in range(self.num_readers)
            ]
            self.size_bytes = os.fstat(self._files[0].fileno()).st_size
            self._opened = opened.pop_all()

    def read_at(self, start: int, views: Sequence[memoryview]) -> int:
        """Fill buffers one after the other from a place on; how many bytes there were."""
        file = self._files.pop()  # one that no other thread reads
        try:
            file.seek(start)
            return sum(_fill(file, view) for view in views)
        finally:
            self._files.append(file)

    def close(self) -> None:
        """Close it."""
        self._opened.close()


def _fill(file: FileIO, view: memoryview) -> int:
    done = 0
    while done < len(view) and (count := file.readinto(view[done:])):
        done += count
    return done


def put(path: Path, content: bytes) -> None:
    """Have a file appear, or replace one, in one piece; on the disk when this returns.

    Everything else in the folder is on the disk before it.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    sync_folder(path.parent)
    sync_folder(path.parent.parent)
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def read_whole(path: Path, *, most_bytes: int) -> bytes:
    """Return a file's content.

    Raises:
        FileNotFoundError: There is no such file.
        IsADirectoryError: It is a folder.
        ValueError: It is a pipe or a device, which may have no end, or holds more than `most_bytes`.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"{path} is a folder")
    if not stat.S_ISREG(
        status.st_mode
    ):  # looked at first: opening a pipe waits until somebody writes into it
        raise ValueError("it is no regular file, but a pipe, a socket or a device")
    if status.st_size > most_bytes:
        raise ValueError(f"it holds {status.st_size} bytes, and at most {most_bytes} are read")
    with path.open("rb") as file:
        return file.read(most_bytes)


def sizes_in(folder: Path) -> dict[str, int]:
    """The files of a folder with their sizes in bytes; none if it is not there.

    It is asked for anew: a network file system may remember that a file was not there.
    """
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def folders_in(directory: Path) -> list[str]:
    """The names of the folders in a directory; none if it is not there."""
    if not directory.is_dir():
        return []
    return [path.name for path in directory.iterdir() if path.is_dir()]


def sees(folder: Path) -> bool:
    """Whether a folder that was made is there, asked of its parent: a network file system may remember otherwise."""
    return folder.parent.is_dir() and folder in folder.parent.iterdir()


def remove_folder(folder: Path) -> None:
    """Delete an empty folder, if it is there."""
    if folder.is_dir():
        folder.rmdir()


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk."""
    if os.name == "nt":  # Windows opens no folders; its file systems journal their entries
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
