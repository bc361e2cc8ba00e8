"""What the launcher says to the person at the terminal, apart from what the script prints."""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager

# What these say when ranks fail or are stopped, the launcher says once, and shorter.
_TALKERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)


def say(text: str) -> None:
    """Write a line to stderr, marked as the launcher's."""
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()


@contextmanager
def torch_silenced() -> Generator[None]:
    """Keep torch from logging what happens to the ranks meanwhile."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
