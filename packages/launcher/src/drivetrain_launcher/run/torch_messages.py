"""Silence what torch logs about ranks, which the launcher reports itself."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

# These loggers report failed and stopped ranks, which the launcher reports itself, once and shorter.
_TALKERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)


@contextmanager
def silence_torch() -> Generator[None]:
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
