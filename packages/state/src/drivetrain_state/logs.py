"""Logging that knows its rank: one line for all processes, or one from each with its rank before it."""

import logging
from collections.abc import MutableMapping
from typing import Any

from drivetrain_state.collectives import barrier
from drivetrain_state.context import Context


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that speaks on rank 0 only, unless a call says otherwise.

    Each call takes two more arguments: `main_process_only=False` logs on every rank, `in_order=True` also lets
    the ranks speak one after the other (then it must be called on all ranks). Lines of several ranks start with
    theirs.
    """

    def __init__(self, logger: logging.Logger, context: Context) -> None:
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
        """Log on rank 0, or on every rank."""
        topology = self._context.topology
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if in_order:
            for rank in range(topology.world_size):
                if rank == topology.rank:
                    super().log(level, f"[rank {rank}] {msg}", *args, **kwargs)
                barrier(self._context)
        elif not main_process_only:
            super().log(level, f"[rank {topology.rank}] {msg}", *args, **kwargs)
        elif topology.is_main:
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Leave message and arguments as they are."""
        return msg, kwargs


def get_logger(name: str, context: Context) -> RankLogger:
    """The logger `name`, aware of the rank. It adds no handler and sets no level: that is the program's choice."""
    return RankLogger(logging.getLogger(name), context)
