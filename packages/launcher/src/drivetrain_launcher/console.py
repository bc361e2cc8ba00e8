"""The launcher's messages on the terminal, marked to stand apart from the script's output."""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager

# These loggers report failed and stopped ranks, which the launcher reports itself, once and shorter.
_TALKERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)


def say(text: str) -> None:
    """Write a line to stderr with the launcher's prefix."""
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()


@contextmanager
def torch_silenced() -> Generator[None]:
    """Run the block without torch's log messages about ranks."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
