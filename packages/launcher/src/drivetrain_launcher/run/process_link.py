"""A connection between the launcher and a process of its own: a message is a line of JSON, with open files beside it.

Standard library only, as the keeper process imports it without site-packages.
"""

import json
import socket
from collections.abc import Sequence
from typing import Any

# 64 KiB hold most messages in one piece; longer ones come in several.
_READ_BYTES = 1 << 16
_MAX_FILES = 16


class ProcessLink:
    """An end of the connection."""

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
