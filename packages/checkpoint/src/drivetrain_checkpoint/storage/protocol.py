"""The storage protocol: what a local disk (the module `local`) and an object store (`remote`) do for checkpoints."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

Place = TypeVar("Place", contravariant=True)

# The largest file to read in one piece: the manifest of a thousand ranks and ten thousand tensors fits.
MOST_BYTES = 2**30


class Writer(Protocol):
    """A writer of a new file: call `write` repeatedly, `finish`, then `close`; `close` without `finish` aborts."""

    def write(self, data: memoryview) -> None:
        """Append `data`. The caller may change `data` after this returns."""
        ...

    def finish(self) -> None:
        """Make the file complete and durable."""
        ...

    def close(self) -> None:
        """Close the file. An unfinished file is not valid, and an object store discards it."""
        ...


class Reader(Protocol):
    """A reader of a file at any offset, by up to `num_readers` threads at once."""

    @property
    def num_readers(self) -> int:
        """The number of threads that read fastest; more threads bring nothing."""
        ...

    @property
    def size_bytes(self) -> int | None:
        """The size of the file in bytes; None if opening the file does not tell the size."""
        ...

    def read_at(self, start: int, views: Sequence[memoryview]) -> int:
        """Fill buffers in order from byte `start` on, and return the number of bytes read."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Storage(Protocol[Place]):
    """The files and folders of one kind of place. Listings and contents are never cached."""

    def make_folder(self, folder: Place) -> None:
        """Prepare a folder for writing, with its parents."""
        ...

    def create(self, path: Place) -> Writer:
        """Create a new file and return its writer."""
        ...

    def open_to_read(self, path: Place) -> Reader:
        """Open an existing file; if it does not exist, this or the first read raises `FileNotFoundError`."""
        ...

    def put(self, path: Place, content: bytes) -> None:
        """Create or replace a file atomically; all other files of the folder are durable before this one."""
        ...

    def read_whole(self, path: Place, *, most_bytes: int = MOST_BYTES) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: The file does not exist.
            IsADirectoryError: The path is a folder.
            ValueError: The path is a pipe, a socket or a device, or the file holds more than `most_bytes`.
        """
        ...

    def sizes_in(self, folder: Place) -> dict[str, int]:
        """Return the sizes in bytes of the files in a folder, by name; empty if the folder does not exist."""
        ...

    def folders_in(self, directory: Place) -> list[str]:
        """Return the names of the folders in a directory; empty if the directory does not exist."""
        ...

    def sees(self, folder: Place) -> bool:
        """Return whether this process sees a folder that another process has just made, bypassing cached listings."""
        ...

    def is_folder(self, folder: Place) -> bool:
        """Return whether a folder exists; in an object store, an empty folder does not exist."""
        ...

    def remove(self, paths: Iterable[Place]) -> None:
        """Delete files, which must exist."""
        ...

    def remove_folder(self, folder: Place) -> None:
        """Delete an empty folder, if it exists."""
        ...
