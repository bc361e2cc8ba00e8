"""The outputs of the ranks, as the keeper reads them: shown, written to files, and their last lines retained.

Standard library only, as the keeper process imports it without site-packages.
"""

import fcntl
import os
import struct
import termios
from collections import deque
from collections.abc import Callable, Mapping

from drivetrain_launcher.run.keeper.keeper_messages import Stream
from drivetrain_launcher.run.output.line_buffer import LineBuffer, mark
from drivetrain_launcher.run.output.screen import Screen, Size

_READ_BYTES = 1 << 18
# What is retained of each rank for a failure: so many lines at most, and of each so much.
_RETAINED_LINES = 1000
_RETAINED_LINE_BYTES = 2000


class RankOutput:
    """An output of a rank, shown on `screen` unless that is None. This object closes the file.

    `retained` has the rank's last lines, and may be shared with the rank's other output. `tell` shows a line of the
    launcher.
    """

    def __init__(
        self,
        stream: Stream,
        file: int,
        screen: Screen | None,
        *,
        retained: deque[bytes],
        tell: Callable[[str], None],
    ) -> None:
        self.stream = stream
        self.file = file
        self._retained = retained
        self._screen = screen
        self._tell = tell
        self._lines = LineBuffer()
        self._copy: int | None = None
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._copy = os.open(stream.file, flags, 0o666) if stream.file else None
        except OSError as error:
            self._give_file_up(error)
        os.set_blocking(file, False)

    def read(self, *, now: float) -> bool:
        """Read and show the bytes that have arrived; return False if none have."""
        try:
            data = os.read(self.file, _READ_BYTES)
        except OSError:  # nothing yet, or a pseudo-terminal whose other side is closed
            return False
        if not data:
            return False
        if self._copy is not None:
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._copy, rest) :]
            except OSError as error:  # the disk is full
                os.close(self._copy)
                self._copy = None
                self._give_file_up(error)
        if self._screen is not None and self.stream.is_leading:
            self._screen.write_leader(data, now=now)
        self._show(self._lines.feed(data), now=now)
        return True

    def end(self, *, now: float) -> None:
        """Show the rest of a rank's output when the rank ends, even without a final newline."""
        self._show(self._lines.flush(), now=now)
        if self._screen is not None and self.stream.is_leading:
            self._screen.end_leader_line()

    def close(self) -> None:
        """Close the files."""
        os.close(self.file)
        if self._copy is not None:
            os.close(self._copy)

    def _give_file_up(self, error: OSError) -> None:
        self._tell(
            f"{self.stream.file}: {error.strerror}; the output is written there no more, the run goes on"
        )

    def _show(self, lines: bytes, *, now: float) -> None:
        """Retain whole lines, and show them unless they are rank 0's, whose bytes are shown as they come."""
        if not lines:
            return
        for line in lines.rsplit(b"\n", _RETAINED_LINES + 1)[-_RETAINED_LINES - 1 : -1]:
            self._retained.append(line[-_RETAINED_LINE_BYTES:])
        if self._screen is not None and not self.stream.is_leading:
            self._screen.write_lines(mark(lines, self.stream.prefix.encode()), now=now)


class RankOutputs:
    """The outputs of all ranks of an attempt; `screens` are the screens by the launcher's file descriptor."""

    def __init__(self, screens: Mapping[int, Screen], *, tell: Callable[[str], None]) -> None:
        self._screens = screens
        self._tell = tell
        self._retained: dict[int, deque[bytes]] = {}
        self._outputs: dict[int, RankOutput] = {}

    @property
    def files(self) -> tuple[int, ...]:
        """The file descriptors to read."""
        return tuple(self._outputs)

    def add(self, stream: Stream, file: int) -> None:
        """Add an output of a rank."""
        retained = self._retained.setdefault(stream.rank, deque(maxlen=_RETAINED_LINES))
        screen = self._screens.get(stream.shown_on)
        self._outputs[file] = RankOutput(stream, file, screen, retained=retained, tell=self._tell)

    def read(self, file: int, *, now: float) -> bool:
        """Read one output once; return False if no bytes have arrived."""
        return self._outputs[file].read(now=now)

    def end(self, *, now: float) -> None:
        """Show all remaining output, after the ranks have ended."""
        for output in sorted(self._outputs.values(), key=lambda each: not each.stream.is_leading):
            output.end(now=now)
        for screen in self._screens.values():
            screen.release(now=now, at_once=True)

    def resize(self, size: Size) -> None:
        """Tell the pseudo-terminals the size of the terminal."""
        for file in filter(os.isatty, self._outputs):
            fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))

    def last_lines(self, rank: int, count: int) -> list[str]:
        """Return the last lines of a rank, on both of its outputs in the order they came."""
        return [line.decode("utf-8", "replace") for line in list(self._retained.get(rank, ()))[-count:]]

    def close(self) -> None:
        """Forget all outputs."""
        for output in self._outputs.values():
            output.close()
        self._outputs.clear()
        self._retained.clear()
