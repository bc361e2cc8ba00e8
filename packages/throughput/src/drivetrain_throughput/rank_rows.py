"""Gather a row of numbers from every rank while training goes on, and read it a step later."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_state import Context


@dataclass(frozen=True, slots=True)
class _Pending:
    rows: Tensor
    mine: Tensor  # kept while it is sent
    work: dist.Work | None


class RankRows:
    """A gather of rows of numbers, at most one at a time.

    It runs over the CPU's part of the process group, which no kernel waits for. A group that was made without one
    gathers on the device, and reading it waits for the device.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pending: _Pending | None = None

    def begin(self, row: list[float]) -> None:
        """Begin to gather a row, as long on every rank. Called on all ranks, as collectives are."""
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
        """Return the row of each rank, once; None if none is there yet."""
        pending = self._pending
        if pending is None:
            return None
        if pending.work is not None:
            if not (wait or pending.work.is_completed()):
                return None
            pending.work.wait()
        self._pending = None
        return pending.rows.tolist()
