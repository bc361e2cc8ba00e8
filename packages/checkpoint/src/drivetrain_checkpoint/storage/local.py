"""The storage on a local disk: reads at any offset, atomic writes, and folders."""

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from drivetrain_checkpoint.storage.direct_writer import DiskWriter
from drivetrain_checkpoint.storage.protocol import MOST_BYTES


class DiskReader:
    """A reader of a file in large pieces at any offset."""

    num_readers = 2  # one thread hashes and allocates memory while the other waits for the disk

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as opened:
            self._files = [
                opened.enter_context(path.open("rb", buffering=0)) for _ in range(self.num_readers)
            ]
            self.size_bytes = os.fstat(self._files[0].fileno()).st_size
            self._opened = opened.pop_all()

    def read_at(self, start: int, views: Sequence[memoryview]) -> int:
        """Fill buffers in order from byte `start` on, and return the number of bytes read."""
        file = self._files.pop()  # a handle that no other thread uses, since seek() moves its position
        try:
            file.seek(start)
            total = 0
            for view in views:
                done = 0
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
                total += done
            return total
        finally:
            self._files.append(file)

    def close(self) -> None:
        """Close the file."""
        self._opened.close()


create = DiskWriter
open_to_read = DiskReader


def make_folder(folder: Path) -> None:
    """Create a folder, with its parents."""
    folder.mkdir(parents=True, exist_ok=True)


def put(path: Path, content: bytes) -> None:
    """Create or replace a file atomically; the file is on the disk when this returns.

    The other entries of the folder are synced to the disk before this file.
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


def read_whole(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"{path} is a folder")
    if not stat.S_ISREG(status.st_mode):  # checked before open(), which blocks on a pipe without a writer
        raise ValueError("it is no regular file, but a pipe, a socket or a device")
    if status.st_size > most_bytes:
        raise ValueError(f"it holds {status.st_size} bytes, and at most {most_bytes} are read")
    with path.open("rb") as file:
        return file.read(most_bytes)


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of the files in a folder, by name; empty if the folder does not exist.

    Lists the folder again each time: a network file system may have cached that a file did not exist.
    """
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def folders_in(directory: Path) -> list[str]:
    """Return the names of the folders in a directory; empty if the directory does not exist."""
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def sees(folder: Path) -> bool:
    """Return whether a folder exists, by listing its parent: a network file system may have cached its absence."""
    return folder.parent.is_dir() and folder.name in os.listdir(folder.parent)


def is_folder(folder: Path) -> bool:
    """Return whether a folder exists."""
    return folder.is_dir()


def remove(paths: Iterable[Path]) -> None:
    """Delete files, which must exist."""
    for path in paths:
        path.unlink()


def remove_folder(folder: Path) -> None:
    """Delete an empty folder, if it exists."""
    if folder.is_dir():
        folder.rmdir()


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk."""
    if os.name == "nt":  # Windows cannot open folders; its file systems journal their entries
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
