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
        moved_to = dict(zip(map(id, before), (sys.stdout, sys.stderr), strict=True))
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        for logger in loggers:
            for handler in getattr(logger, "handlers", ()):  # a placeholder has none
                if isinstance(handler, logging.StreamHandler) and id(handler.stream) in moved_to:
                    self._moved.append((handler, handler.stream))
                    handler.setStream(moved_to[id(handler.stream)])

    def show(self, text: str) -> None:
        """Redraw the line, cut to the terminal's width."""
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        """Remove the line, and restore standard output and error."""
        self._live.stop()
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved = []
