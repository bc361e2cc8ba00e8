"""Prepared loaders: each process reads its part of the data, or the main process reads for all.

Programs without an Accelerator can also prepare a loader, skip batches and find a loader's sampler.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from drivetrain_accelerate.loaders.loader_adapter import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    build_loader,
    make_stateful,
    sharded_of,
    with_shift_labels,
)
from drivetrain_accelerate.loaders.resume_checks import (
    PassedBatches,
    check_epoch,
    check_skipped,
    count_passed_batches,
)
from drivetrain_accelerate.plugins.enums import RNGType
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_data import BatchPlan, ResumedLoaderError, Shard, ShardedLoader, own_seed, shard_loader
from drivetrain_data import skip_first_batches as skip_batches_of
from drivetrain_data.settings import UnevenPolicy
from drivetrain_data.sources.wrapped_datasets import epoch_parts
from drivetrain_state import broadcast_object

logger = logging.getLogger(__name__)


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """The loader of this process's part of the data."""

    passed_batches: PassedBatches | None = None  # of a loop that goes on in an epoch

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
        base = build_loader(use_stateful_dataloader, dataset, **kwargs)
        sharded = shard_loader(
            base, Shard(0, 1), device=device, seed=_seed_of(base, None), non_blocking=_non_blocking
        )
        self._set(base, sharded, device, skip_batches)
        self.iteration = iteration
        self.rng_types, self.synchronized_generator = rng_types, synchronized_generator

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield this process's batches, and report the loop's position to the gradient state."""
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
                yield with_shift_labels(batch) if self.adds_shift_labels else batch
            self.iteration += 1  # not for loops that are broken off, as with Accelerate
            if self.passed_batches is not None:
                self.passed_batches.has_ended = True
        finally:
            if self.passed_batches is not None and not self.passed_batches.has_ended:
                self.passed_batches = None
            self.end()

    def _reach_end(self, plan: BatchPlan) -> None:
        """Record that the current batch is the last of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next loop, also for the dataset and the samplers if they have `set_epoch`."""
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
        """Raise a RuntimeError: the order was divided among the ranks when the loader was prepared."""
        raise RuntimeError(
            f"set_sampler({type(sampler).__name__}): the order of a prepared loader is divided among processes; "
            "build a DataLoader with the sampler and prepare() it"
        )

    def begin(self) -> None:
        """Record that a loop begins. If the number of samples in its last step is known, record it too."""
        super().begin()
        total = self.total_batch_size
        is_known = not self.skip_batches or isinstance(self.dataset, IterableDataset)
        if total and is_known and not self.drops_last and hasattr(self.dataset, "__len__"):
            self.remainder = self.total_dataset_length % total


class DataLoaderDispatcher(DataLoaderShard):
    """The loader of this process's part, if the main process reads for all ranks. Constructed on all ranks."""

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
        """Record that a loop begins. Its last step's size is unknown until the main process has read that step."""
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
    """Return the class for a prepared loader: a dispatcher if one process reads for all ranks."""
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
    """Return the loader of a process's part of the data, by default of this process. The order is rank 0's.

    The numbers may describe processes that do not exist. Called on all ranks.
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
    """Raise a ValueError if a program gives a function of its own to slice batches."""
    if slice_fn is not None:
        raise ValueError(
            f"{argument}=: batches are sliced along dimension 0 of their tensors; "
            "have collate_fn return such batches"
        )


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """Return the loader of one process's part of a loader's data; refuse a slicing function. Called on all ranks.

    `rng_types` and `use_seedable_sampler` change nothing: the order always follows from a seed and the epoch.
    """
    refuse_slicing(slice_fn_for_dispatch, "prepare_data_loader(slice_fn_for_dispatch")
    if isinstance(dataloader, DataLoaderAdapter):
        return dataloader
    dataloader = make_stateful(dataloader) if use_stateful_dataloader else dataloader
    place = (device or PartialState().device) if put_on_device else None
    sharded = shard_for_process(
        dataloader,
        process_index,
        num_processes,
        device=place,
        even="pad" if even_batches else "uneven",
        split_batches=split_batches,
        dispatch=dispatch_batches,
        non_blocking=non_blocking,
        data_seed=data_seed,
    )
    kind = choose_kind(dataloader, sharded, is_dispatched=dispatch_batches, is_placed=put_on_device)
    return kind.over(dataloader, sharded, place)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a prepared loader that leaves out the first batches of its epochs, without reading them.

    After `load_state` a loader continues at its saved position by itself, and is returned unchanged: programs also
    skip the batches that they have counted. If a program loads only an optimizer's state, as transformers' Trainer
    does, its count must match the samples that were read. Otherwise a DataStateError is raised.
    """
    if not isinstance(dataloader, DataLoaderAdapter):
        dataloader = DataLoaderShard.over(dataloader, shard_loader(dataloader, Shard(0, 1)))
    try:
        skipping = skip_batches_of(dataloader.sharded, num_batches)
    except ResumedLoaderError:
        logger.info(
            "skip_first_batches(%d) skips nothing: the loader already goes on at the checkpoint's position",
            num_batches,
        )
        return dataloader
    check_skipped(sharded_of(dataloader.sharded), num_batches)
    rest = type(dataloader).over(dataloader.users_loader, skipping, dataloader.device)
    rest.iteration, rest.adds_shift_labels = dataloader.iteration, dataloader.adds_shift_labels
    return rest


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler that gives the single indices of a loader's batches; None if there is none."""
    if isinstance(dataloader, DataLoaderAdapter):
        dataloader = dataloader.users_loader
    batches: Any = getattr(dataloader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)
