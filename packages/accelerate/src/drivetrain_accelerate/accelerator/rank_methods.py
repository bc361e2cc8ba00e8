"""The methods of an Accelerator that tell of the ranks and exchange data between them."""

from typing import Any

import torch

from drivetrain_accelerate.accelerator.composed_run import ComposedRun, shown
from drivetrain_accelerate.accelerator.real_rows import gather_first_rows, gather_real_rows
from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_accelerate.states.partial_state import RankControl
from drivetrain_accelerate.tensors.rank_collectives import gather as gather_over_ranks
from drivetrain_accelerate.tensors.rank_collectives import pad_across_processes as pad_to_largest
from drivetrain_accelerate.tensors.rank_collectives import reduce as reduce_over_ranks
from drivetrain_state import Context


class RankMethods(RankControl, ComposedRun):
    """The ranks of the run: what each is, what each does alone, and what all exchange.

    Attributes:
        flag_tensor: The flag of this rank, of shape (); None until `set_trigger` or `check_trigger` is called.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.flag_tensor: torch.Tensor | None = None

    context: Context = shown("state.context", "Drivetrain's context of the ranks.")
    distributed_type: DistributedType = shown(
        "state.distributed_type", "The way in which processes train together."
    )
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

        Of each rank's rows the first are those of its real samples; what the tail repeats is left out.
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
