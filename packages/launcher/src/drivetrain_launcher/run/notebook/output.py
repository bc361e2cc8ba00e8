"""The output of all ranks as one text: whole lines with the rank in front, and rank 0's unfinished line as it grows.

A progress bar is an unfinished line that is written again and again after a carriage return. Rank 0's is shown at
each `refresh`; when another rank has a line to show, the bar is wiped, and drawn again below. Of the other ranks'
bars only the last state is shown, once its line ends.
"""

import re
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Callable
from typing import TextIO

_PIECES = re.compile(r"(\r\n|\r|\n)")


class StreamView:
    """The merged stdout, or stderr, of all ranks; the lines of a single rank have no prefix."""

    def __init__(self, write: Callable[[str], object], *, num_ranks: int) -> None:
        self._write = write
        self._has_prefix = num_ranks > 1
        self._decoders: list[IncrementalDecoder] = [
            getincrementaldecoder("utf-8")("replace") for _ in range(num_ranks)
        ]
        self._unfinished = [""] * num_ranks
        self._shown = ""  # the part of rank 0's unfinished line that is on the screen
        self._has_returned = False  # rank 0's last character was a carriage return

    def feed(self, rank: int, data: bytes) -> None:
        """Show the lines that a rank has ended; keep its unfinished line."""
        for piece in _PIECES.split(self._decoders[rank].decode(data)):
            if piece in ("\n", "\r\n"):
                self._end_line_of(rank)
            elif rank != 0:
                self._unfinished[rank] += piece
            elif piece == "\r":
                self._has_returned = True
            elif piece:
                self._unfinished[0] = piece if self._has_returned else self._unfinished[0] + piece
                self._has_returned = False

    def draw(self) -> None:
        """Show rank 0's unfinished line as it is now."""
        text, shown = self._unfinished[0], self._shown
        if text == shown:
            return
        if shown and text.startswith(shown):
            self._write(text[len(shown) :])
        else:
            self._write(("\r" if shown else "") + self._prefix(0) + text)
        self._shown = text

    def wipe(self) -> None:
        """Remove rank 0's unfinished line from the screen, until `draw`."""
        if self._shown:
            width = len(self._prefix(0) + self._shown)
            self._write(f"\r{' ' * width}\r")
            self._shown = ""

    def finish(self) -> None:
        """End all unfinished lines."""
        for rank, text in enumerate(self._unfinished):
            if text:
                self._end_line_of(rank)

    def _end_line_of(self, rank: int) -> None:
        text = self._unfinished[rank]
        if rank == 0:
            self.draw()
            self._write("\n" if text else f"{self._prefix(0).rstrip()}\n")
            self._shown, self._has_returned = "", False
        else:
            state = text.rstrip("\r").rpartition("\r")[2]
            if state.strip() or not text:  # else it is a bar that has wiped itself
                was_shown = bool(self._shown)
                self.wipe()
                self._write(f"{self._prefix(rank)}{state}".rstrip() + "\n")
                if was_shown:
                    self.draw()
        self._unfinished[rank] = ""

    def _prefix(self, rank: int) -> str:
        return f"[rank {rank}] " if self._has_prefix else ""


class OutputView:
    """Both streams of all ranks, shown on this process's streams, which in Jupyter belong to the running cell."""

    def __init__(self, stdout: TextIO, stderr: TextIO, *, num_ranks: int) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._views = {
            name: StreamView(stream.write, num_ranks=num_ranks) for name, stream in self._streams.items()
        }
        # On a terminal both streams share the screen; in a cell each has a place of its own.
        self._is_shared = stdout.isatty() and stderr.isatty()

    def feed(self, name: str, rank: int, data: bytes) -> None:
        """Show the lines that a rank has written to "stdout" or "stderr"."""
        other = "stdout" if name == "stderr" else "stderr"
        if self._is_shared:
            self._views[other].wipe()
            self._streams[other].flush()
        self._views[name].feed(rank, data)
        self._streams[name].flush()

    def refresh(self) -> None:
        """Show rank 0's unfinished lines as they are now, such as a progress bar."""
        for name, view in self._views.items():
            view.draw()
            self._streams[name].flush()

    def finish(self) -> None:
        """End all unfinished lines."""
        for name, view in self._views.items():
            view.finish()
            self._streams[name].flush()
