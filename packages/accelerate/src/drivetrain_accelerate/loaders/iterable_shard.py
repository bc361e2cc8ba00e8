"""The samples of one process out of an iterable dataset that every process reads."""

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process: every process reads all of the dataset, and keeps its part of each batch.

    Args:
        dataset: The dataset, which yields the same samples on all processes.
        batch_size: The number of samples in a batch of a process; with `split_batches`, of all processes.
        drop_last: Whether an incomplete last batch is dropped; else it is filled with samples of the beginning.
        num_processes: The number of processes.
        process_index: The number of the process.
        split_batches: Whether `batch_size` is the sum over processes.

    Raises:
        ValueError: Batches cannot be cut into equal parts.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"split_batches=True: batch_size={batch_size} must be a multiple of the {num_processes} processes"
            )
        self.dataset: Any = dataset
        self.batch_size, self.drop_last = batch_size, drop_last
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and tell the dataset if it wants to know."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _own(self) -> int:
        """The number of samples of a batch on each process."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def __len__(self) -> int:
        """Return the number of samples of this process."""
        stride = self._own * self.num_processes
        full, rest = divmod(len(self.dataset), stride)
        return (full + (rest > 0 and not self.drop_last)) * self._own

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of this process."""
        own, first = self._own, cast("list[Any]", [])
        mine = slice(self.process_index * own, (self.process_index + 1) * own)
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        samples = iter(self.dataset)
        while batch := list(islice(samples, own * self.num_processes)):
            first = first or batch
            if (lacking := own * self.num_processes - len(batch)) and self.drop_last:
                return
            yield from [*batch, *islice(cycle(first), lacking)][mine]
