"""The indices or samples of one process, for programs that use samplers and datasets without a loader."""

from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from drivetrain_data.sampling.step_info import look_ahead

Value = TypeVar("Value")


class SeedableRandomSampler(RandomSampler):
    """A random order, equal on all processes, that depends on a seed and the epoch. Each loop raises the epoch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed: int | None = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        """Yield the order of the current epoch, and raise the epoch."""
        own: torch.Generator | None = self.generator
        self.generator = own or torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next loop."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """The share of one process in the batches of a batch sampler."""

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        size: int | None = getattr(batch_sampler, "batch_size", None)
        _check_divides(split_batches, size, num_processes)
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
        for batch, is_last in look_ahead(map(list, self.batch_sampler)):
            first = first or batch
            size = max(self.batch_size or 0, len(batch))
            if is_last and self.drop_last and len(batch) < size:
                return
            each = -(-size // self.num_processes)
            if self.even_batches:
                batch += _cycle_values(first, each * self.num_processes - len(batch))
            if part := batch[self.process_index * each : (self.process_index + 1) * each]:
                yield part

    def _whole(self) -> Iterator[list[int]]:
        """Give whole batches to the processes in turn; drop or fill a last round that has too few batches."""
        size, count = self.batch_size, self.num_processes
        first: list[list[int]] = []
        turn: list[list[int]] = []
        is_regular = size is not None
        for batch, is_last in look_ahead(map(list, self.batch_sampler)):
            is_full = len(batch) == size
            is_regular = is_regular and (is_full or (is_last and len(batch) < (size or 0)))
            if len(first) < count:
                first.append(batch)
            turn.append(batch)
            if len(turn) == count and (is_full or not is_last or not is_regular):
                yield turn[self.process_index]
                turn = []
        if not turn or self.drop_last:
            return
        if self.even_batches:
            turn = _fill_turn(turn, first, size if is_regular else None, count)
        if self.process_index < len(turn):
            yield turn[self.process_index]


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches after the skipped ones."""
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """The number of batches, including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        """Return the number of batches without the skipped ones."""
        return max(0, self.total_length - self.skip_batches)


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process: every process reads all of the dataset, and keeps its part of each batch."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        _check_divides(split_batches and batch_size > 1, batch_size, num_processes)
        self.dataset: Any = dataset
        self.batch_size, self.drop_last = batch_size, drop_last
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and pass it to the dataset if that has `set_epoch`."""
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


def _check_divides(split_batches: bool, batch_size: int | None, num_processes: int) -> None:
    if split_batches and (batch_size is None or batch_size % num_processes):
        raise ValueError(
            f"split_batches=True: batch_size={batch_size} must be a multiple of the {num_processes} processes"
        )


def _fill_turn(
    turn: list[list[int]], first: list[list[int]], size: int | None, count: int
) -> list[list[int]]:
    """Return a batch for each process, filled with the first samples if `size` is given, or with first batches."""
    if size is None:
        return [*turn, *_cycle_values(first, count - len(turn))]
    rest = list(chain.from_iterable(turn))
    rest += _cycle_values(list(chain.from_iterable(first)), size * count - len(rest))
    return [rest[begin : begin + size] for begin in range(0, len(rest), size)]


def _cycle_values(values: list[Value], count: int) -> list[Value]:
    """Return `count` values; after the last value, begin again with the first."""
    return list(islice(cycle(values), count))
