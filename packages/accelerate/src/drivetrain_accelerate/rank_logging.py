"""Loggers and progress bars for the main process or, by an argument, for all processes."""

import logging
from functools import cache
from typing import Any

from drivetrain_accelerate.states.partial_state import current_context
from drivetrain_config import environ
from drivetrain_state import RankLogger


class MultiProcessAdapter(RankLogger):
    """A logger for the main process; for all processes with `main_process_only=False`, or `in_order=True`."""

    prefix = "[RANK {}] "

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger)
        self.extra = extra

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log for the calling line. `stacklevel=2` means the same line, as in Accelerate, and 3 its caller."""
        above = max(kwargs.pop("stacklevel", 2), 2)
        super().log(level, msg, *args, stacklevel=above, **kwargs)

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        """Add the logger's own attributes to the attributes of a record."""
        if self.extra:
            kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return msg, kwargs

    @cache  # noqa: B019 a logger lives as long as the process
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning, unless the same warning was logged before."""
        above = max(kwargs.pop("stacklevel", 2), 2)
        self.warning(*args, stacklevel=above + 1, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a named logger for several processes. The ranks need not be connected yet."""
    level = log_level or environ.read("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of tqdm that is shown on the first process of each node."""
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise ImportError("the progress bar needs tqdm: pip install tqdm") from error
    if args and isinstance(args[0], bool):
        raise ValueError(f"tqdm({args[0]}, ...): say main_process_only={args[0]} after the iterable")
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not current_context().topology.is_local_main
    return bar(*args, **kwargs)
