"""Warn of the rank that the others wait for."""

import logging
from collections.abc import Sequence

from drivetrain_throughput.straggler import Straggler

logger = logging.getLogger(__name__)


class StragglerWarning:
    """A warning that is repeated only for another rank or phase."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._told: tuple[int, str] | None = None  # the rank and phase of the straggler found last

    def tell(self, straggler: Straggler | None) -> None:
        """Warn of a straggler; None says that there is none now."""
        told = self._told
        self._told = None if straggler is None else (straggler.rank, straggler.phase)
        if straggler is None or told == self._told:
            return
        logger.warning(
            "rank %d (host %s) is slow: %s takes it %.3g s a step longer than the other ranks (%.3g s), which wait "
            "for it",
            straggler.rank,
            self._hosts[straggler.rank],
            straggler.phase,
            straggler.slower_by,
            straggler.usual_seconds,
        )
