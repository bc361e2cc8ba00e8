"""Gather the measurements of each rank, and compute the metrics of all ranks."""

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_state import Context, gather_object
from drivetrain_throughput.meter import StepRecord, Throughput, ThroughputMeter
from drivetrain_throughput.phase_times import PHASES
from drivetrain_throughput.straggler import Straggler, find_straggler

logger = logging.getLogger(__name__)

_NO_TOKENS = -1.0


@dataclass(frozen=True, slots=True)
class _Pending:
    rows: Tensor
    mine: Tensor  # kept while it is sent
    work: dist.Work | None


class RankRows:
    """A gather of rows of numbers, at most one at a time.

    It runs over the CPU's part of the process group, which no kernel waits for. Without a CPU part, it runs on the
    device, and reading the result waits for the device.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pending: _Pending | None = None

    def begin(self, row: list[float]) -> None:
        """Begin to gather a row, which has the same length on every rank. Called on all ranks."""
        world_size, group = self._context.topology.world_size, self._context.group
        if world_size == 1:
            self._pending = _Pending(torch.tensor([row], dtype=torch.float64), torch.empty(0), None)
            return
        backends = dist.get_backend_config(group)
        has_cpu = "cpu:" in backends or backends == "gloo"
        device = torch.device("cpu") if has_cpu else self._context.device
        mine = torch.tensor(row, dtype=torch.float32, device=device)
        rows = mine.new_empty(world_size * len(row))
        work = dist.all_gather_into_tensor(rows, mine, group=group, async_op=True)
        self._pending = _Pending(rows.view(world_size, -1), mine, work)

    def take(self, *, wait: bool = False) -> list[list[float]] | None:
        """Return the rows of all ranks, once per gather; None if no finished gather is left to return."""
        pending = self._pending
        if pending is None:
            return None
        if pending.work is not None:
            if not (wait or pending.work.is_completed()):
                return None
            pending.work.wait()
        self._pending = None
        return pending.rows.tolist()


class RankThroughput:
    """The throughput of all ranks, one gather at a time, and the warning of a slow rank."""

    def __init__(self, context: Context, *, window_steps: int) -> None:
        self._context = context
        self._num_shards = context.ranks("reads").size
        self._rows = RankRows(context)
        self._steady = ThroughputMeter(window_steps=window_steps)
        # Ranks compile, allocate and tell the plan in the first step, each at its own pace.
        self._is_first = True
        self._hosts: Sequence[str] = ()  # of the ranks; gathered once
        self._slow: tuple[int, str] | None = None  # the rank and phase of the newest straggler
        self._measured: Throughput | None = None  # by this rank, when the gather under way began

    def add(self, step: StepRecord) -> None:
        """Add a step of this rank to the steps that are compared."""
        if not self._is_first:
            self._steady.add(step)
        self._is_first = False

    def begin(self, measured: Throughput) -> None:
        """Begin to gather every rank's times and tokens, after the last gather was taken. Called on all ranks.

        Args:
            measured: The throughput that this rank knows; its tokens are this rank's times the number of data shards.
        """
        if not self._hosts:
            self._hosts = gather_object(self._context, socket.gethostname())
        seconds = self._steady.over_window().phase_seconds
        tokens = _NO_TOKENS  # of this rank in a step, on average
        if measured.tokens_per_second is not None and measured.steps_per_second:
            tokens = measured.tokens_per_second / measured.steps_per_second / self._num_shards
        self._rows.begin([*(seconds.get(phase, 0.0) for phase in PHASES), tokens])
        self._measured = measured

    def take(self, *, wait: bool = False) -> dict[str, float] | None:
        """Return the metrics of all ranks, once per gather, and warn of a slow rank.

        Returns:
            The metrics on rank 0; None on other ranks, and while no gather has finished.
        """
        if self._measured is None or (rows := self._rows.take(wait=wait)) is None:
            return None
        measured, self._measured = self._measured, None
        if not self._context.topology.is_main:
            return None
        metrics = measured.as_metrics()
        tokens = [row[-1] for row in rows]
        if measured.steps_per_second is not None and _NO_TOKENS not in tokens:
            # Tokens are summed, not rates: each rank has a window of its own, but a step is a step for all.
            # As many ranks read each shard of the data.
            in_a_step = sum(tokens) * self._num_shards / len(rows)
            metrics["throughput/tokens_per_second"] = in_a_step * measured.steps_per_second
        straggler = find_straggler([dict(zip(PHASES, row, strict=False)) for row in rows])
        before, self._slow = self._slow, None
        if straggler is not None:
            metrics["throughput/straggler/rank"] = straggler.rank
            metrics["throughput/straggler/slower_by_seconds"] = straggler.slower_by
            self._slow = straggler.rank, straggler.phase
            if self._slow != before:
                self._warn_of(straggler)
        return metrics

    def drop(self) -> None:
        """Drop a gather for which other ranks have not sent their rows."""
        self._measured = None

    def _warn_of(self, straggler: Straggler) -> None:
        logger.warning(
            "rank %d (host %s) is slow: %s takes it %.3g s a step longer than the other ranks (%.3g s), which wait "
            "for it",
            straggler.rank,
            self._hosts[straggler.rank],
            straggler.phase,
            straggler.slower_by,
            straggler.usual_seconds,
        )
