"""The messages from the launcher to its keeper: a line of JSON each, with the files beside it.

Standard library only, as the keeper process imports it without site-packages.
"""

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# 64 KiB hold any message; the largest has one process id for each rank of a node.
_READ_BYTES = 1 << 16
_MAX_FILES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperOptions:
    """The facts that the keeper knows from its start.

    Attributes:
        launcher: The process id of the launcher.
        grace_seconds: The time that ranks have to save after their launcher has died.
        are_same: Whether stdout and stderr are the same terminal, pipe or file.
        terminals: Whether stdout and stderr are terminals that move their cursor when told.
    """

    launcher: int
    grace_seconds: float
    are_same: bool
    terminals: tuple[bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An output of a rank, whose file descriptor travels beside the message.

    Attributes:
        rank: The global rank.
        shown_on: The file descriptor where it is shown: 1 or 2; 0 if it is not shown.
        prefix: The text before each line.
        is_leading: Whether its bytes are shown unchanged, and the lines of others between them.
        file: The path of the file to write as well; empty for none.
    """

    rank: int
    shown_on: int
    prefix: str = ""
    is_leading: bool = False
    file: str = ""


class KeeperLink:
    """An end of the connection between the launcher and its keeper."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._text = b""
        self._files: list[int] = []

    def send(self, kind: str, files: Sequence[int] = (), **content: Any) -> None:
        """Send a message, with open files.

        Raises:
            OSError: If the other end has died.
        """
        line = json.dumps({"kind": kind, **content}).encode() + b"\n"
        if files:
            sent = socket.send_fds(self.connection, [line], files)
            line = line[sent:]
        self.connection.sendall(line)

    def send_stream(self, stream: Stream, file: int) -> None:
        """Send a stream with its file descriptor.

        Raises:
            OSError: If the other end has died.
        """
        self.send("stream", [file], stream=asdict(stream))

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for messages; the files that came with them are taken by `take_file`, in order.

        Returns:
            The messages that are whole, perhaps none; None if the other end has closed or died.
        """
        try:
            data, files, _, _ = socket.recv_fds(self.connection, _READ_BYTES, _MAX_FILES)
        except ConnectionError:
            return None
        self._files += files
        if not data:
            return None
        *lines, self._text = (self._text + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def take_file(self) -> int:
        """Return the next file descriptor that came."""
        return self._files.pop(0)
