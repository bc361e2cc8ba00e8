"""Rank-aware logging: one line for all processes, or one per rank with the rank as its prefix."""

import logging
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from drivetrain_config import environ
from drivetrain_state.collectives.operations import barrier
from drivetrain_state.context import Context


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that logs on rank 0 only, unless a call says otherwise.

    Each call takes two more arguments: `main_process_only=False` logs on every rank; `in_order=True` logs on every
    rank in rank order, and must be called on all ranks. These lines start with the rank. Without a context, each call
    reads the ranks from the process group or the launcher's environment.
    """

    prefix = "[rank {}] "  # begins each line that several ranks log

    def __init__(self, logger: logging.Logger, context: Context | None = None) -> None:
        super().__init__(logger, {})
        self._context = context

    def log(
        self,
        level: int,
        msg: object,
        *args: object,
        main_process_only: object = True,
        in_order: object = False,
        **kwargs: Any,
    ) -> None:
        """Log on rank 0, or on every rank; RuntimeError if `in_order` is set and the ranks are not connected yet."""
        if not in_order and not self.isEnabledFor(level):
            return
        if self._context is not None:
            rank, world_size = self._context.topology.rank, self._context.topology.world_size
        elif dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            launched = environ.launched()
            rank, world_size = (0, 1) if launched is None else (launched.rank, launched.world_size)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if in_order:
            if world_size > 1 and self._context is None and not dist.is_initialized():
                raise RuntimeError(
                    f"in_order=True of the logger {self.logger.name!r}, while the ranks are not connected: make the "
                    "Accelerator, or call connect(), first; or log with main_process_only=False, in no order"
                )
            for speaker in range(world_size):
                if speaker == rank:
                    super().log(level, f"{self.prefix.format(rank)}{msg}", *args, **kwargs)
                if world_size > 1 and self._context is not None:
                    barrier(self._context)
                elif world_size > 1:
                    nccl = "cuda:nccl" in str(dist.get_backend_config()).split(",")
                    dist.barrier(device_ids=[torch.cuda.current_device()] if nccl else None)
        elif not main_process_only:
            super().log(level, f"{self.prefix.format(rank)}{msg}", *args, **kwargs)
        elif rank == 0:
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return message and arguments unchanged."""
        return msg, kwargs


def get_logger(
    name: str, context: Context | None = None, *, log_level: str | int | None = None
) -> RankLogger:
    """Return the rank-aware logger `name`. It may be created before the ranks connect, such as at import.

    The logger has no handler, and no level unless `log_level` sets a level, such as "INFO". Without a
    context, each call reads the ranks from the process group, else from the launcher's environment, else assumes a
    single process.

    Example:
        >>> get_logger("train").info("printed by rank 0 alone")
    """
    if not isinstance(context, Context | None):  # pyright: ignore[reportUnnecessaryIsInstance] Accelerate's order
        raise TypeError(
            f"get_logger({name!r}, {context!r}): the second argument is a context; say a level by name, "
            f"get_logger({name!r}, log_level={context!r})"
        )
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper() if isinstance(log_level, str) else log_level)
    return RankLogger(logger, context)
