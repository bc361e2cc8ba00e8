"""The launcher's messages on the terminal, marked to stand apart from the script's output."""

import logging
import os
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


def is_own_terminal(file: int) -> bool:
    """Return whether a file descriptor is the terminal that this session runs in.

    A pseudo-terminal that another program opened to read what is written there is none: Open MPI gives one to every
    process, and merges their lines into whatever its own output is.
    """
    try:
        os.tcgetpgrp(file)
    except OSError:
        return False
    return True


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
