"""Gather what each rank has measured, and make the metrics of all ranks from it."""

import socket

from drivetrain_state import Context, gather_object
from drivetrain_throughput.meter import StepRecord, Throughput, ThroughputMeter
from drivetrain_throughput.phase_times import PHASES
from drivetrain_throughput.rank_rows import RankRows
from drivetrain_throughput.straggler import find_straggler
from drivetrain_throughput.straggler_warning import StragglerWarning

_NO_TOKENS = -1.0


class RankThroughput:
    """The throughput of all ranks, one gather at a time, and the warning of a rank that is slow.

    Args:
        context: The ranks and their group.
        readers: For each shard of the data, the first of the ranks that read it.
        window_steps: The number of steps whose mean times are compared.
    """

    def __init__(self, context: Context, *, readers: tuple[int, ...], window_steps: int) -> None:
        self._context, self._readers = context, readers
        self._rows = RankRows(context)
        self._steady = ThroughputMeter(window_steps=window_steps)
        # Ranks compile, allocate and tell the plan in the first step, each at its own pace.
        self._is_first = True
        self._warning: StragglerWarning | None = None
        self._measured: Throughput | None = None  # by this rank, when the gather under way began

    def add(self, step: StepRecord) -> None:
        """Add a step of this rank to those that are compared."""
        if not self._is_first:
            self._steady.add(step)
        self._is_first = False

    def begin(self, measured: Throughput) -> None:
        """Begin to gather every rank's times and tokens; the gather before was taken. Called on all ranks.

        Args:
            measured: The throughput that this rank knows; its tokens are those of one reader times all readers.
        """
        if self._warning is None:
            self._warning = StragglerWarning(gather_object(self._context, socket.gethostname()))
        seconds = self._steady.over_window().phase_seconds
        self._rows.begin([*(seconds.get(phase, 0.0) for phase in PHASES), self._tokens_of_step(measured)])
        self._measured = measured

    def take(self, *, wait: bool = False) -> dict[str, float] | None:
        """Return the metrics of all ranks, once, and warn of a rank that is slow.

        Returns:
            The metrics, on rank 0; None elsewhere, and while no gather is over.
        """
        measured, warning = self._measured, self._warning
        if measured is None or warning is None or (rows := self._rows.take(wait=wait)) is None:
            return None
        self._measured = None
        if not self._context.topology.is_main:
            return None
        metrics = measured.as_metrics()
        tokens = [rows[rank][-1] for rank in self._readers]
        if measured.steps_per_second is not None and _NO_TOKENS not in tokens:
            # Tokens are summed, not rates: each rank has a window of its own, but a step is a step for all.
            metrics["throughput/tokens_per_second"] = sum(tokens) * measured.steps_per_second
        straggler = find_straggler([dict(zip(PHASES, row, strict=False)) for row in rows])
        if straggler is not None:
            metrics["throughput/straggler/rank"] = straggler.rank
            metrics["throughput/straggler/slower_by_seconds"] = straggler.slower_by
        warning.tell(straggler)
        return metrics

    def drop(self) -> None:
        """Drop what other ranks have not sent."""
        self._measured = None

    def _tokens_of_step(self, measured: Throughput) -> float:
        """Return the number of this rank's tokens in a step, on average; `_NO_TOKENS` if it is unknown."""
        if measured.tokens_per_second is None or not measured.steps_per_second:
            return _NO_TOKENS
        return measured.tokens_per_second / measured.steps_per_second / len(self._readers)
