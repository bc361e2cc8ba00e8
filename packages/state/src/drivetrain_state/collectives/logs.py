"""Logging that knows its rank: one line for all processes, or one from each with its rank before it."""

import logging
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from drivetrain_config import environ
from drivetrain_state.collectives.operations import barrier
from drivetrain_state.context import Context


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that speaks on rank 0 only, unless a call says otherwise.

    Each call takes two more arguments: `main_process_only=False` logs on every rank, `in_order=True` also lets
    the ranks speak one after the other (then it must be called on all ranks). Lines of several ranks start with
    theirs.

    Args:
        logger: What writes the lines.
        context: Ranks and group; without one, each call asks the process group or the launcher for them.
    """

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
        """Log on rank 0, or on every rank.

        Raises:
            RuntimeError: The ranks are to speak in order, and have not met yet.
        """
        if not in_order and not self.isEnabledFor(level):
            return
        rank, world_size = self._ranks()
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if in_order:
            self._check_met(world_size)
            for speaker in range(world_size):
                if speaker == rank:
                    super().log(level, f"[rank {rank}] {msg}", *args, **kwargs)
                if world_size > 1:
                    self._wait()
        elif not main_process_only:
            super().log(level, f"[rank {rank}] {msg}", *args, **kwargs)
        elif rank == 0:
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Leave message and arguments as they are."""
        return msg, kwargs

    def _ranks(self) -> tuple[int, int]:
        """Return this process's rank and the number of ranks, as of now."""
        if self._context is not None:
            return self._context.topology.rank, self._context.topology.world_size
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        launched = environ.launched()
        return (0, 1) if launched is None else (launched.rank, launched.world_size)

    def _wait(self) -> None:
        """Wait until every rank is here."""
        if self._context is not None:
            barrier(self._context)
        else:
            nccl = "cuda:nccl" in str(dist.get_backend_config()).split(",")
            dist.barrier(device_ids=[torch.cuda.current_device()] if nccl else None)

    def _check_met(self, world_size: int) -> None:
        """Refuse to have several ranks speak in order while nothing connects them."""
        if world_size > 1 and self._context is None and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"in_order=True of the logger {self.logger.name!r}, while the ranks are not connected: make the "
                "Accelerator, or call connect(), first; or log with main_process_only=False, in no order"
            )


def get_logger(
    name: str, context: Context | None = None, *, log_level: str | int | None = None
) -> RankLogger:
    """Return the logger `name`, aware of the rank. It may be made before the ranks have met, as at import.

    No handler is added, and no level set unless one is given: both are the program's choice.

    Args:
        name: As for `logging.getLogger`.
        context: Ranks and group. Without one each call finds them: in the process group, else what the launcher
            said, else there is one process.
        log_level: The level to set, such as "INFO".

    Raises:
        TypeError: `context` is none.
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
