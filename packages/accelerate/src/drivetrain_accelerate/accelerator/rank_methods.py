"""The methods of an Accelerator that tell of the ranks and exchange data between them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from drivetrain_accelerate.accelerator.composed_run import ComposedRun, shown
from drivetrain_accelerate.accelerator.real_rows import gather_first_rows, gather_real_rows
from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_accelerate.tensors.rank_collectives import gather as gather_over_ranks
from drivetrain_accelerate.tensors.rank_collectives import pad_across_processes as pad_to_largest
from drivetrain_accelerate.tensors.rank_collectives import reduce as reduce_over_ranks


class RankMethods(ComposedRun):
    """The ranks of the run: what each is, what each does alone, and what all exchange.

    Attributes:
        flag_tensor: The flag of this rank, of shape (); None until `set_trigger` or `check_trigger` is called.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.flag_tensor: torch.Tensor | None = None

    use_distributed: bool = shown("state.use_distributed", "True if there are several ranks.")

    @property
    def multi_device(self) -> bool:
        """True if there are several ranks on accelerators."""
        return self.use_distributed and self.device.type != "cpu"

    distributed_type: DistributedType = shown(
        "state.distributed_type", "The way in which processes train together."
    )
    num_processes: int = shown("state.num_processes", "The number of ranks.")
    process_index: int = shown("state.process_index", "The rank of this process.")
    local_process_index: int = shown("state.local_process_index", "The rank of this process on its node.")
    device: torch.device = shown("state.device", "The device of this process.")
    is_main_process: bool = shown("state.is_main_process", "True if this process is rank 0.")
    is_local_main_process: bool = shown(
        "state.is_local_main_process", "True if this process is rank 0 of its node."
    )
    is_last_process: bool = shown("state.is_last_process", "True if this process has the highest rank.")

    def split_between_processes(
        self, inputs: list[Any] | tuple[Any, ...] | dict[str, Any] | torch.Tensor, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Run the block with this rank's share of a list, tuple, dict of lists or tensor."""
        return self.state.split_between_processes(inputs, apply_padding=apply_padding)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function so that it runs on rank 0 only and returns None elsewhere."""
        return self.state.on_main_process if function is None else self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function so that it runs on rank 0 of each node only."""
        state = self.state
        return state.on_local_main_process if function is None else state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs on the highest rank only."""
        return self.state.on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function so that it runs on one rank only."""
        return self.state.on_process(function, process_index=process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function so that it runs on one rank of each node only."""
        return self.state.on_local_process(function, local_process_index=local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0 before the other ranks. Called on all ranks."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0 of each node before the node's other ranks. Called on all ranks."""
        return self.state.local_main_process_first()

    def wait_for_everyone(self) -> None:
        """Wait until every rank has reached this call. Called on all ranks."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first rank of each node, as `print` does."""
        self.state.print(*args, **kwargs)

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
