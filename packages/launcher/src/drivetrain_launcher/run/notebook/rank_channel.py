"""The messages between a notebook and its ranks: one byte names the message, and its content is a file sent with it.

A message is a single byte, so that no message is read by half, and a write never waits for the reader. The
content, which may be large, is in a file without a name: nothing is left on the disk when either side is killed.
For Unix only.
"""

import mmap
import os
import pickle
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from tempfile import TemporaryFile
from typing import IO, Any

# What matplotlib imports as its backend in the ranks of a notebook that shows figures inline.
FIGURE_BACKEND = "module://drivetrain_launcher.run.notebook.figure_backend"
# The variable that tells a rank the number of its channel's socket.
CHANNEL_VARIABLE = "NOTEBOOK_CHANNEL"


class Message(Enum):
    """The messages of both sides.

    The notebook says `SETUP` (a pickled `CallSetup`), then `CALL` (a pickled call) for each call, and `END`. For each
    call a rank says `BEGAN`; any number of `FIGURE`s (a PNG); and once `RETURNED` (`Returned`), `FAILED` (a pickled
    `Failed`) or `INTERRUPTED`.
    """

    SETUP = b"S"
    CALL = b"C"
    END = b"E"
    BEGAN = b"B"
    FIGURE = b"P"
    RETURNED = b"R"
    FAILED = b"F"
    INTERRUPTED = b"I"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSetup:
    """The state of the notebook that a rank takes over before a call; `search_path` is the notebook's `sys.path`."""

    rank: int
    environment: Mapping[str, str]
    folder: str
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An exception of the function, or of shipping it or its return value.

    `line` is the exception in one line, `traceback` starts at the function's frame, `exception` is pickled, or None
    if it cannot be, and `time` is in seconds since the epoch.
    """

    line: str
    traceback: str
    exception: bytes | None
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A return value, still pickled.

    Attributes:
        content: The file: the times of change of the user's own modules, by file; then the value.
    """

    content: IO[bytes]

    def read(self) -> tuple[Mapping[str, int], Any]:
        """Return the modules' times and the value."""
        with self.content as content:
            content.seek(0)
            return pickle.load(content), pickle.load(content)


class RankChannel:
    """An end of the connection between the notebook and a rank.

    Args:
        connection: A connected Unix socket, which the channel owns.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the number of the socket, for `select`."""
        return self._connection.fileno()

    def send(self, message: Message, content: IO[bytes] | None = None) -> None:
        """Send a message.

        Raises:
            OSError: If the other side has ended.
        """
        if content is None:
            self._connection.sendall(message.value)
            return
        content.flush()
        socket.send_fds(self._connection, [message.value], [content.fileno()])

    def receive(self) -> tuple[Message, IO[bytes] | None] | None:
        """Wait for a message; return it with its content, or None once the other side has ended."""
        try:
            word, numbers, _, _ = socket.recv_fds(self._connection, 1, 1)
        except ConnectionError:
            return None
        if not word:
            return None
        for number in numbers:
            os.set_inheritable(number, False)
        return Message(word), os.fdopen(numbers[0], "rb") if numbers else None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def new_content() -> IO[bytes]:
    """Return an empty file without a name, for the content of a message."""
    return TemporaryFile(prefix="drivetrain_")


def view_content(content: IO[bytes]) -> Any:
    """Return the content as a buffer. Ranks may read it at once, since they share no file position."""
    return mmap.mmap(content.fileno(), 0, prot=mmap.PROT_READ)
