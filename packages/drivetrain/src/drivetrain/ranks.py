"""What a process is among its peers, and what they say to each other."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TextIO

import torch

from drivetrain import metrics
from drivetrain.call_site import CallSites
from drivetrain_data import ActiveLoaders, ShardedLoader
from drivetrain_state import Context
from drivetrain_state.collectives import control
from drivetrain_state.collectives import operations as collectives


class Ranks:
    """The part of the Accelerator that needs no model: drivetrain_state with the context filled in.

    Args:
        context: Ranks, device and process group.
        reading: Which loaders are being read: the current one knows its epoch's tail.
        readers: For each part of the data, in order, the first of the ranks that read it.

    Attributes:
        context: The same.
    """

    def __init__(self, context: Context, reading: ActiveLoaders, readers: Sequence[int]) -> None:
        self.context = context
        self._reading = reading
        self._readers = readers
        self._triggered = False
        self._call_sites = CallSites()

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.context.device

    @property
    def num_processes(self) -> int:
        """The number of ranks."""
        return self.context.topology.world_size

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.num_processes > 1

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.context.topology.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its node."""
        return self.context.topology.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.context.topology.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its node's rank 0."""
        return self.context.topology.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.context.topology.is_last

    def gather(self, tensor: Any) -> Any:
        """Concatenate nested tensors over ranks, rank by rank, in dimension 0. Called on all ranks.

        Args:
            tensor: Nested tensors of equal shapes on all ranks; their first sizes may differ in an epoch's tail.
        """
        return metrics.gather(self.context, tensor, self._reading)

    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, loader: ShardedLoader[Any] | None = None
    ) -> Any:
        """Gather what was computed from the current batch: each sample once, in the dataset's order.

        Called on all ranks. Of ranks that see the same batch, as in tensor parallelism, the first one counts.
        Ranks that left rows out, by a filter, may give unequal numbers of them: they come rank by rank.

        Args:
            input_data: Nested tensors with samples in dimension 0 (or of shape (), one a rank); or any objects.
            use_gather_object: Gather a list of any objects, one a sample.
            loader: The loader whose batch it is, where two loaders are read side by side.

        Raises:
            TrimError: Only some of a rank's samples count, and which of its rows are theirs is not certain.
            UnpreparedLoaderError: The call stands in a loop over a DataLoader that every rank reads whole.
            AmbiguousLoaderError: Two loaders are read side by side, and `loader` is needed to tell what counts.
            CollectiveMismatchError: Sizes beyond the first differ between ranks.
        """
        return metrics.gather_for_metrics(
            self.context,
            input_data,
            self._reading,
            readers=self._readers,
            as_objects=use_gather_object,
            loader=loader,
            sites=self._call_sites,
        )

    def set_trigger(self) -> None:
        """Raise this rank's flag, for `check_trigger` to see on all ranks."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank raised its flag; lowers them all. Called on all ranks."""
        raised = torch.tensor(int(self._triggered), device=self.device)
        self._triggered = False
        return bool(collectives.reduce(self.context, raised, op="max").item())

    def reduce(self, tensor: Any, reduction: Literal["sum", "mean", "max", "min"] = "sum") -> Any:
        """Reduce nested tensors of equal shapes over ranks; every rank gets the result. Called on all ranks."""
        return collectives.reduce(self.context, tensor, op=reduction)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Give every rank the nested tensors of one. Called on all ranks with equal shapes."""
        return collectives.broadcast(self.context, tensor, src=from_process)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad nested tensors to the largest size over ranks in one dimension. Called on all ranks."""
        return collectives.pad_across_processes(
            self.context, tensor, dim=dim, pad_index=pad_index, pad_first=pad_first
        )

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here. Called on all ranks."""
        collectives.barrier(self.context)

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: TextIO | None = None,
        flush: bool = True,
    ) -> None:
        """Print on rank 0 alone, as `print` does; the line is out at once, unless `flush=False`."""
        control.print_on_main(self.context, *values, sep=sep, end=end, file=file, flush=flush)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs on rank 0 alone and gives None elsewhere."""
        return control.on_main_process(self.context)(function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs on each node's rank 0 alone."""
        return control.on_local_main_process(self.context)(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs on the highest rank alone."""
        return control.on_last_process(self.context)(function)

    def on_process(self, function: Callable[..., Any], process_index: int) -> Callable[..., Any]:
        """Wrap a function so that it runs on one rank alone."""
        return control.on_process(self.context, process_index)(function)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Rank 0 runs the block before the others. Called on all ranks."""
        return control.main_process_first(self.context)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Each node's rank 0 runs the block before the node's others. Called on all ranks."""
        return control.local_main_process_first(self.context)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Give each rank its share of a list, tuple, dict of lists or tensor."""
        return control.split_between_processes(self.context, inputs, apply_padding=apply_padding)
