"""Batch samplers of one process, as programs build them themselves: indices only, without a loader."""

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A random order that follows from a seed and the epoch, the same on all processes.

    Args:
        *args: The arguments of `RandomSampler`.
        **kwargs: The same by name, and `data_seed`, the seed; torch's initial seed by default.

    Attributes:
        initial_seed: The seed of epoch 0; that of epoch n is larger by n.
        epoch: The number of the next loop, which each loop raises by one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed: int | None = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        """Yield the order of the epoch, and go on to the next one."""
        own: torch.Generator | None = self.generator
        self.generator = own or torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next loop."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """The batches of one process out of those of a batch sampler.

    Args:
        batch_sampler: The batches of all processes, of one size but for the last.
        num_processes: The number of processes.
        process_index: The number of the process.
        split_batches: Whether each batch is cut into parts, one for each process; else each process gets whole ones.
        even_batches: Whether the end is filled with indices of the beginning, so that all get equal batches.

    Raises:
        ValueError: Batches cannot be cut into equal parts, or filled, since they have no one size.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        size: int | None = getattr(batch_sampler, "batch_size", None)
        if split_batches and size is not None and size % num_processes:
            raise ValueError(
                f"split_batches=True: batch_size={size} must be a multiple of the {num_processes} processes"
            )
        if even_batches and size is None:
            raise ValueError(
                f"even_batches=True with {type(batch_sampler).__name__}, which has no batch_size to fill batches to: "
                "say even_batches=False"
            )
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.batch_size: int | None = size  # pyright: ignore[reportIncompatibleVariableOverride] as the sampler's
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)

    @property
    def total_length(self) -> int:
        """The number of batches of all processes."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        """Return the number of batches of this process."""
        if self.split_batches:
            return self.total_length
        full, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last or not rest:
            return full
        return full + (self.even_batches or self.process_index < rest)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this process."""
        return self._parts() if self.split_batches else self._whole()

    def _parts(self) -> Iterator[list[int]]:
        """Cut each batch into a part for each process."""
        first: list[int] = []
        for given in self.batch_sampler:
            batch: list[int] = list(given)
            first = first or batch
            size = self.batch_size or len(batch)
            if self.even_batches and len(batch) < size:
                if self.drop_last:
                    return
                batch += _cycled(first, size - len(batch))
            each = size // self.num_processes
            if part := batch[self.process_index * each : (self.process_index + 1) * each]:
                yield part

    def _whole(self) -> Iterator[list[int]]:
        """Take every batch of this process's turn; a turn that not all processes get is dropped, or filled."""
        first: list[int] = []
        turn: list[list[int]] = []
        for given in self.batch_sampler:
            batch: list[int] = list(given)
            if len(first) < (self.batch_size or 0) * self.num_processes:
                first += batch
            turn.append(batch)
            if len(turn) == self.num_processes and len(batch) == (self.batch_size or len(batch)):
                yield turn[self.process_index]
                turn = []
        if not turn or self.drop_last:
            return
        if self.even_batches:
            size = self.batch_size or 0
            rest = [index for batch in turn for index in batch]
            rest += _cycled(first, size * self.num_processes - len(rest))
            yield rest[self.process_index * size : (self.process_index + 1) * size]
        elif self.process_index < len(turn):
            yield turn[self.process_index]


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches.

    Args:
        batch_sampler: The batches to read.
        skip_batches: The number of batches to leave out.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches behind the first."""
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """The number of batches with those that are left out."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return max(0, self.total_length - self.skip_batches)


def _cycled(indices: list[int], count: int) -> list[int]:
    """Return as many indices as asked for, from the beginning and again from there."""
    return list(islice(cycle(indices), count))
