"""The methods of an Accelerator that tell the ranks' numbers and exchange data between ranks."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from drivetrain_accelerate.accelerator.composed_run import ComposedRun
from drivetrain_accelerate.compat import map_nested
from drivetrain_accelerate.plain_values import shown
from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_accelerate.states.partial_state import RankControl
from drivetrain_accelerate.tensors.nested_tensors import recursively_apply
from drivetrain_accelerate.tensors.rank_collectives import gather as gather_over_ranks
from drivetrain_accelerate.tensors.rank_collectives import gather_object
from drivetrain_accelerate.tensors.rank_collectives import pad_across_processes as pad_to_largest
from drivetrain_accelerate.tensors.rank_collectives import reduce as reduce_over_ranks
from drivetrain_data import BatchPlan
from drivetrain_data.remainder import arrays_in, trim_arrays, trim_objects, with_arrays, without_arrays
from drivetrain_state import Context, LeafError
from drivetrain_state.collectives import operations as collectives


class RankMethods(RankControl, ComposedRun):
    """Methods for the ranks of a run: their numbers, code for chosen ranks, and exchanges of data."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.flag_tensor: torch.Tensor | None = None  # of shape (); once a trigger is set or checked

    context: Context = shown("state.context", "Drivetrain's context of the ranks.")
    distributed_type: DistributedType = shown("state.distributed_type", "The way of training together.")
    num_processes: int = shown("state.num_processes", "The number of ranks.")
    process_index: int = shown("state.process_index", "The rank of this process.")
    local_process_index: int = shown("state.local_process_index", "The rank of this process on its node.")
    device: torch.device = shown("state.device", "The device of this process.")

    @property
    def multi_device(self) -> bool:
        """True if there are several ranks on accelerators."""
        return self.use_distributed and self.device.type != "cpu"

    def gather(self, tensor: Any) -> Any:
        """Concatenate nested tensors over ranks, rank by rank, in dimension 0. Called on all ranks."""
        return gather_over_ranks(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results of the current batch, each sample once. Called on all ranks.

        Rows of samples that only fill up the last batch are removed.
        """
        gathered = gather_real_rows if self.is_strict else gather_first_rows
        active = self.gradient_state.active_dataloader
        return gathered(self.state.context, active, input_data, as_objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce nested tensors of equal shapes over ranks; `scale` is for XLA alone. Called on all ranks."""
        return reduce_over_ranks(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad nested tensors to the largest size over ranks in one dimension. Called on all ranks."""
        return pad_to_largest(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Raise this rank's flag, which `check_trigger` reports on all ranks."""
        self.inner.set_trigger()
        self.flag_tensor = torch.tensor(1, device=self.state.device)

    def check_trigger(self) -> bool:
        """Return whether any rank raised its flag, and lower all flags. Called on all ranks."""
        self.flag_tensor = torch.tensor(0, device=self.state.device)
        return self.inner.check_trigger()


def gather_real_rows(context: Context, active: Any, data: Any, *, as_objects: bool) -> Any:
    """Gather results, and remove the rows of samples that fill up a batch. Called on all ranks."""
    sharded = getattr(active, "sharded", None)
    plan: BatchPlan | None = getattr(sharded, "current", None)
    size: int | None = getattr(active, "full_batch_size", None)
    if not as_objects:
        try:
            if context.topology.world_size == 1 and counts_to_keep(plan) is None:
                return collectives.gather(context, data)  # most batches: nothing to exchange, count or cut
            gathered, rows = collectives.gather_rows(context, data)
        except LeafError:  # some leaf is no tensor; all ranks find this, since they give the same structure
            with suppress(LeafError):
                if arrays := arrays_in(data):
                    return _gather_real_arrays(context, plan, data, arrays, batch_size=size)
        else:
            return real_rows(plan, gathered, rows, batch_size=size)
    return trim_objects(plan, collectives.gather_object(context, data))


def _gather_real_arrays(
    context: Context, plan: BatchPlan | None, data: Any, arrays: Sequence[Any], *, batch_size: int | None
) -> Any:
    """Gather nested data that has arrays among its leaves; keep the structure. Called on all ranks."""
    gathered, rows = collectives.gather_rows(context, without_arrays(data))
    by_rank = [list(map(np.atleast_1d, given)) for given in collectives.gather_object(context, arrays)]
    if plan is not None and (real := counts_to_keep(plan)) is not None:
        by_rank = [
            [part[: kept_rows(len(part), size, count, full=batch_size)] for part in parts]
            for parts, size, count in zip(by_rank, plan.sizes or real, real, strict=True)
        ]
    others = real_rows(plan, gathered, rows, batch_size=batch_size)
    return with_arrays(data, others, trim_arrays(None, by_rank))


def gather_first_rows(context: Context, active: Any, data: Any, *, as_objects: bool) -> Any:
    """Gather results, and cut the joined rows to the number of samples in the last step, as Accelerate does."""
    count = active.remainder if active is not None and active.end_of_dataloader else -1
    try:
        recursively_apply(torch.Tensor.detach, data, error_on_other_type=True)
    except TypeError:
        as_objects = True
    if as_objects:
        gathered = gather_object(data)
        return gathered[:count] if count > 0 else gathered

    def first(rows: torch.Tensor) -> torch.Tensor:
        return rows[:count] if count > 0 and rows.dim() else rows

    return recursively_apply(first, gather_over_ranks(data))


def counts_to_keep(plan: BatchPlan | None) -> Sequence[int] | None:
    """Return the number of real samples on each rank; None if the batch holds no repeated samples."""
    return None if plan is None or (plan.is_whole and not plan.is_last) else plan.real_counts


def real_rows(plan: BatchPlan | None, gathered: Any, rows: Any, *, batch_size: int | None) -> Any:
    """Keep the rows of real samples of each rank; without a plan, keep all rows.

    For each gathered tensor, `rows` holds a tensor of shape (world_size,) with the number of rows on each rank.
    """
    real = counts_to_keep(plan)
    if plan is None or real is None:
        return gathered
    sizes = plan.sizes or real

    def cut(leaf: torch.Tensor | None, of_ranks: torch.Tensor) -> torch.Tensor | None:
        if leaf is None:
            return None
        given: list[int] = of_ranks.tolist()
        kept = [kept_rows(*each, full=batch_size) for each in zip(given, sizes, real, strict=True)]
        if kept == given:
            return leaf
        return torch.cat([part[:count] for part, count in zip(leaf.split(given), kept, strict=True)])

    return map_nested(cut, gathered, rows)


def kept_rows(num_rows: int, size: int, real: int, *, full: int | None) -> int:
    """Return the number of a rank's rows that belong to real samples. These rows come first."""
    if num_rows in (size, full):
        return min(num_rows, real)
    if size and num_rows % size == 0:  # several rows a sample
        return num_rows // size * real
    return num_rows  # the program chose them
