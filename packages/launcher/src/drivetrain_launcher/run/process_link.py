"""A connection between the launcher and a process that it starts: messages are lines of JSON with open files.

Standard library only, as the keeper process imports it without site-packages.
"""

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subprocess import Popen

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
        """Send a message, with open files; an OSError if the other end has died."""
        line = json.dumps({"kind": kind, **content}).encode() + b"\n"
        if files:
            sent = socket.send_fds(self.connection, [line], files)
            line = line[sent:]
        self.connection.sendall(line)

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for messages, whose files `take_file` returns in order; None if the other end has closed or died.

        The list is empty while no message is complete.
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


def start_linked(
    command: Callable[[int], Sequence[str]],
    *,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    stdin: int | None = None,
    outputs: int | None = None,
) -> tuple["Popen[bytes]", socket.socket]:
    """Start a process that leads a session, and return it with our end of a connection to it.

    `command` gets the number of the process's socket; `outputs` are stdout and stderr, as `Popen` takes them.
    """
    # Here: the keeper process starts none, and must itself start in milliseconds.
    from subprocess import Popen

    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with theirs:
        process = Popen(
            command(theirs.fileno()),
            env=environment,
            cwd=folder,
            stdin=stdin,
            stdout=outputs,
            stderr=outputs,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, ours
