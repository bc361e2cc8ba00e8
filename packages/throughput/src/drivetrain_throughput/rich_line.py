"""The live line on a terminal, drawn by rich."""

import logging
import sys
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text


class RichLine:
    """A line at the bottom of a terminal, above which prints and logging appear."""

    def __init__(self, stream: TextIO) -> None:
        before = (sys.stdout, sys.stderr)
        # Without a thread of its own: the line changes when the loop says so.
        self._live = Live(console=Console(file=stream), auto_refresh=False, transient=True)
        self._live.start()
        # Handlers of logging keep the streams that they were made with, and would write into the line.
        self._moved = _move_handlers(dict(zip(map(id, before), (sys.stdout, sys.stderr), strict=True)))

    def show(self, text: str) -> None:
        """Redraw the line, cut to the terminal's width."""
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Remove the line, and restore standard output and error."""
        self._live.stop()
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved = []


def _move_handlers(moved_to: dict[int, TextIO]) -> list[tuple[logging.StreamHandler[Any], Any]]:
    """Give handlers of logging that write to one of the streams the stream that stands for it now."""
    loggers = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if hasattr(one, "handlers")),
    ]
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in moved_to:
                moved.append((handler, handler.stream))
                handler.setStream(moved_to[id(handler.stream)])
    return moved
