"""The rank of a process, and collectives between ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, TextIO

import torch

from drivetrain.accelerator import metrics
from drivetrain.parts.parts import HasParts, Parts, needs_run
from drivetrain_data import ShardedLoader, UnpreparedLoops
from drivetrain_state.collectives import control
from drivetrain_state.collectives import operations as collectives


class Ranks(HasParts):
    """The part of an Accelerator that needs no model: drivetrain_state's functions with the context filled in."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._triggered = False
        self._unprepared_loops = UnpreparedLoops()

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.context.device

    @property
    def num_processes(self) -> int:
        """The number of ranks."""
        return self.context.topology.world_size

    @property
    def use_distributed(self) -> bool:
        """True if there are several ranks."""
        return self.num_processes > 1

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self.context.topology.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its node."""
        return self.context.topology.local_rank

    @property
    def is_main_process(self) -> bool:
        """True if this process is rank 0."""
        return self.context.topology.is_main

    @property
    def is_local_main_process(self) -> bool:
        """True if this process is rank 0 of its node."""
        return self.context.topology.is_local_main

    @property
    def is_last_process(self) -> bool:
        """True if this process has the highest rank."""
        return self.context.topology.is_last

    @needs_run
    def gather(self, tensor: Any) -> Any:
        """Concatenate nested tensors over ranks, rank by rank, in dimension 0. Called on all ranks.

        Args:
            tensor: Nested tensors of equal shapes on all ranks; in an epoch's tail, dimension 0 may differ.
        """
        return metrics.gather(self._parts, tensor)

    @needs_run
    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, loader: ShardedLoader[Any] | None = None
    ) -> Any:
        """Gather results of the current batch: each sample once, in the dataset's order.

        Called on all ranks. If several ranks read the same batch, as in tensor parallelism, only the first
        contributes. Ranks that filter rows may pass different numbers of rows: these are joined rank by rank.

        Args:
            input_data: Nested tensors with samples in dimension 0 (or of shape (), one per rank); or any objects.
            use_gather_object: Whether to gather a list of any objects, one per sample.
            loader: The loader of the batch, where two loaders are read side by side.

        Raises:
            TrimError: Only some of a rank's samples count, and it is ambiguous which rows belong to them.
            UnpreparedLoaderError: The call is inside a loop over a DataLoader that every rank reads in full.
            AmbiguousLoaderError: Two loaders are read side by side, and `loader` is needed to tell them apart.
            CollectiveMismatchError: Sizes beyond dimension 0 differ between ranks.
        """
        if loader is None and self.use_distributed:
            self._unprepared_loops.check(input_data)
        if self._parts.words is not None:
            self._parts.words.look_at_evaluation()
        return metrics.gather_for_metrics(
            self._parts, input_data, as_objects=use_gather_object, loader=loader
        )

    @needs_run
    def set_trigger(self) -> None:
        """Raise this rank's flag, which `check_trigger` reports on all ranks."""
        self._triggered = True

    @needs_run
    def check_trigger(self) -> bool:
        """Return whether any rank raised its flag, and lower all flags. Called on all ranks."""
        raised = torch.tensor(int(self._triggered), device=self.device)
        self._triggered = False
        return bool(collectives.reduce(self.context, raised, op="max").item())

    @needs_run
    def reduce(self, tensor: Any, reduction: Literal["sum", "mean", "max", "min"] = "sum") -> Any:
        """Reduce nested tensors of equal shapes over ranks; every rank gets the result. Called on all ranks."""
        return collectives.reduce(self.context, tensor, op=reduction)

    @needs_run
    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Broadcast the nested tensors of one rank to all. Called on all ranks with equal shapes."""
        return collectives.broadcast(self.context, tensor, src=from_process)

    @needs_run
    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad nested tensors to the largest size over ranks in one dimension. Called on all ranks."""
        return collectives.pad_across_processes(
            self.context, tensor, dim=dim, pad_index=pad_index, pad_first=pad_first
        )

    @needs_run
    def wait_for_everyone(self) -> None:
        """Wait until every rank has reached this call. Called on all ranks."""
        collectives.barrier(self.context)

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: TextIO | None = None,
        flush: bool = True,
    ) -> None:
        """Print on rank 0 only, as `print` does; the output is flushed at once, unless `flush=False`."""
        control.print_on_main(self.context, *values, sep=sep, end=end, file=file, flush=flush)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs on rank 0 only and returns None elsewhere."""
        return control.on_main_process(self.context)(function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs on rank 0 of each node only."""
        return control.on_local_main_process(self.context)(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs on the highest rank only."""
        return control.on_last_process(self.context)(function)

    def on_process(self, function: Callable[..., Any], process_index: int) -> Callable[..., Any]:
        """Wrap a function so that it runs on one rank only."""
        return control.on_process(self.context, process_index)(function)

    @needs_run
    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0 before the other ranks. Called on all ranks."""
        return control.main_process_first(self.context)

    @needs_run
    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0 of each node before the node's other ranks. Called on all ranks."""
        return control.local_main_process_first(self.context)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Run the block with this rank's share of a list, tuple, dict of lists or tensor."""
        return control.split_between_processes(self.context, inputs, apply_padding=apply_padding)
