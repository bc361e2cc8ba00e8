"""Prepared loaders: of this process's part of the data, and of data that the main process reads for all."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from drivetrain_accelerate.loaders.loader_adapter import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    build_loader,
    sharded_of,
)
from drivetrain_accelerate.loaders.resume_checks import PassedBatches, check_epoch, count_passed_batches
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_data import BatchPlan, Shard, ShardedLoader, own_seed, shard_loader
from drivetrain_data.settings import UnevenPolicy
from drivetrain_data.sources.wrapped_datasets import epoch_parts
from drivetrain_state import broadcast_object


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """The loader of this process's part of the data.

    Attributes:
        passed_batches: The batches that a loop which goes on in an epoch has received; None without one.
    """

    passed_batches: PassedBatches | None = None

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Any = None,
        synchronized_generator: Any = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        del _drop_last, torch_device_mesh
        base = build_loader(use_stateful_dataloader, dataset, **kwargs)
        sharded = shard_loader(
            base, Shard(0, 1), device=device, seed=_seed_of(base, None), non_blocking=_non_blocking
        )
        self._set(base, sharded, device, skip_batches)
        self.iteration = iteration
        self.rng_types, self.synchronized_generator = rng_types, synchronized_generator

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield this process's batches, and tell all that ask where the loop is."""
        self.begin()
        try:
            self._draw()
            self.passed_batches = count_passed_batches(self) or self.passed_batches
            is_resumed = sharded_of(self.sharded).is_resumed  # what a loader skips lies behind its state
            for batch in sharded_of(self.sharded) if is_resumed else self.sharded:
                if self.passed_batches is not None:
                    self.passed_batches.receive()
                current = sharded_of(self.sharded).current
                if current is not None and current.is_last:
                    self.end_of_dataloader = True
                    self._reach_end(current)
                yield batch
            self.iteration += 1  # not for loops that are broken off, as with Accelerate
            if self.passed_batches is not None:
                self.passed_batches.has_ended = True
        finally:
            if self.passed_batches is not None and not self.passed_batches.has_ended:
                self.passed_batches = None
            self.end()

    def _reach_end(self, plan: BatchPlan) -> None:
        """Take note of the epoch's last batch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next loop, and tell the dataset and the samplers that want to know."""
        check_epoch(sharded_of(self.sharded), epoch)
        self.iteration = epoch
        sharded_of(self.sharded).set_epoch(epoch)
        base: Any = self.users_loader
        batches = getattr(base, "batch_sampler", None)
        data = (getattr(base, "dataset", None), getattr(base, "sampler", None))
        for each in epoch_parts(*data, batches, getattr(batches, "sampler", None)):
            each.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int:
        """The number of samples of a full step over all ranks."""
        return (self.full_batch_size or 0) * sharded_of(self.sharded).shard.count

    @property
    def total_dataset_length(self) -> int:
        """The number of samples of the dataset."""
        return len(self.dataset)  # pyright: ignore[reportArgumentType] torch's Dataset does not promise a length

    def get_sampler(self) -> Sampler[Any] | None:
        """Return the user's sampler, whose order this loader follows."""
        return getattr(self.users_loader, "sampler", None)

    def set_sampler(self, sampler: Sampler[Any]) -> None:
        """Refuse: the order was divided among the ranks when the loader was prepared."""
        raise RuntimeError(
            f"set_sampler({type(sampler).__name__}): the order of a prepared loader is divided among processes; "
            "build a DataLoader with the sampler and prepare() it"
        )

    def begin(self) -> None:
        """Record that a loop begins, and how many samples its last step will have, if that is known."""
        super().begin()
        total = self.total_batch_size
        is_known = not self.skip_batches or isinstance(self.dataset, IterableDataset)
        if total and is_known and not self.drops_last and hasattr(self.dataset, "__len__"):
            self.remainder = self.total_dataset_length % total


class DataLoaderDispatcher(DataLoaderShard):
    """The loader of this process's part of data that the main process reads for all. Constructed on all ranks."""

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Any = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        del torch_device_mesh
        refuse_slicing(slice_fn, "DataLoaderDispatcher(slice_fn")
        base, device = build_loader(use_stateful_dataloader, dataset, **kwargs), PartialState().device
        sharded = shard_for_process(
            base,
            device=device,
            even="drop" if _drop_last else "pad",
            split_batches=split_batches,
            dispatch=True,
            non_blocking=_non_blocking,
        )
        self._set(base, sharded, device, skip_batches)
        self.iteration = iteration

    def _reach_end(self, plan: BatchPlan) -> None:
        if plan.real_counts is not None and plan.sizes is not None:
            self.remainder = sum(plan.real_counts)

    def begin(self) -> None:
        """Record that a loop begins; its last step is unknown until the main process has read it."""
        DataLoaderStateMixin.begin(self)


class SkipDataLoader(DataLoaderShard):
    """A loader whose epochs leave out their first batches."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs
        )


def choose_kind(
    base: Any, sharded: ShardedLoader[Any], *, is_dispatched: bool | None, is_placed: bool = True
) -> type[DataLoaderShard]:
    """Return the class of a prepared loader: a dispatcher where one process reads for all."""
    if is_dispatched is None:
        is_dispatched = is_placed and isinstance(getattr(base, "dataset", None), IterableDataset)
    return DataLoaderDispatcher if is_dispatched or sharded.is_dispatched else DataLoaderShard


def shard_for_process(
    loader: Any,
    process_index: int | None = None,
    num_processes: int | None = None,
    *,
    device: torch.device | None,
    even: UnevenPolicy,
    split_batches: bool,
    dispatch: bool | None,
    non_blocking: bool,
    data_seed: int | None = None,
) -> ShardedLoader[Any]:
    """Return the loader of a process's part of the data, in rank 0's order; for None, of this rank's.

    A program may read for other processes than there are. Called on all ranks.
    """
    state = PartialState()
    own = Shard(state.process_index, state.num_processes)
    shard = Shard(
        own.index if process_index is None else process_index,
        own.count if num_processes is None else num_processes,
    )
    seed = _seed_of(loader, data_seed)
    return shard_loader(
        loader,
        shard,
        device=device,
        even="uneven" if even == "pad" and shard.count == 1 else even,
        split_batches=split_batches,
        dispatch=dispatch,
        group=state.context.group if shard == own else None,
        seed=broadcast_object(state.context, seed) if shard == own else seed,
        compare_samples=False,  # programs for Accelerate build random data without a seed
        non_blocking=non_blocking,
    )


def _seed_of(loader: Any, data_seed: int | None) -> int:
    seed = own_seed(loader)
    if seed is None:
        seed = torch.initial_seed() % 2**63 if data_seed is None else data_seed
    return seed


def refuse_slicing(slice_fn: Callable[..., Any] | None, argument: str) -> None:
    """Refuse a program's own slicing of batches."""
    if slice_fn is not None:
        raise ValueError(
            f"{argument}=: batches are sliced along dimension 0 of their tensors; "
            "have collate_fn return such batches"
        )
