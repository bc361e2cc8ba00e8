"""The messages of a logger in a block, on a rank too, where pytest's `caplog` does not reach."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def messages_of(logger: str, *, level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect what a logger is told in the block, on a rank too."""
    found: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    watched = logging.getLogger(logger)
    before = watched.level
    watched.addHandler(handler)
    watched.setLevel(level)
    try:
        yield found
    finally:
        watched.removeHandler(handler)
        watched.setLevel(before)
