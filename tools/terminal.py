"""A terminal that a test or a picture drives as a user does: keys go in, and the screen is read."""

import errno
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from pathlib import Path

import pyte

ENTER, DOWN, UP, CTRL_C = "\r", "\x1b[B", "\x1b[A", "\x03"


class Terminal:
    """A program on a terminal of its own, whose screen is kept as an emulator would show it.

    Args:
        command: The program with its arguments.
        folder: The working folder of the program.
        environment: The environment of the program.
        columns: The width of the terminal.
        rows: The height of the terminal.
        seconds: The longest wait for what the screen should show.

    Attributes:
        screen: The screen with its colours, as pyte keeps it.
        process: The program.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        columns: int = 120,
        rows: int = 100,
        seconds: float = 45,
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._seconds = seconds
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, "TERM": environment.get("TERM", "xterm-256color")},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)

    @property
    def text(self) -> str:
        """The text that the screen shows."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def press(self, *keys: str) -> None:
        """Type keys."""
        os.write(self._master, "".join(keys).encode())

    def wait_for(self, pattern: str, *, times: int = 1) -> str:
        """Read until the screen shows a pattern (several times); return the screen."""
        deadline = time.monotonic() + self._seconds
        while len(re.findall(pattern, self.text)) < times:
            if time.monotonic() > deadline or not self._read(0.1):
                assert len(re.findall(pattern, self.text)) >= times, f"no {pattern!r} on:\n{self.text}"
        return self.text

    def end(self) -> int:
        """Read until the program has ended; return its exit code."""
        deadline = time.monotonic() + self._seconds
        while self._read(0.1):
            assert time.monotonic() < deadline, f"still running:\n{self.text}"
        return self.process.wait(self._seconds)

    def close(self) -> None:
        """Kill the program if it runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)

    def _read(self, seconds: float) -> bool:
        """Read what has been written; return False at the end."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            chunk = os.read(self._master, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # so Linux reports the end of a terminal
                raise
            return False
        self._stream.feed(chunk)
        if b"\x1b[6n" in chunk:  # the program asks where the cursor is
            cursor = self.screen.cursor
            os.write(self._master, f"\x1b[{cursor.y + 1};{cursor.x + 1}R".encode())
        return bool(chunk)


def _take_terminal() -> None:
    """Let Ctrl-C and the terminal's end reach a program as signals, also where this one was told to ignore them."""
    ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
