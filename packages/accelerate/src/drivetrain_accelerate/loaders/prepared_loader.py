"""A prepared loader: drivetrain's sharded loader, which a program takes for a torch DataLoader."""

import logging
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Sampler

from drivetrain_accelerate.states.gradient_state import GradientState
from drivetrain_data import ResumedLoaderError, Shard, ShardedLoader, shard_loader
from drivetrain_data import skip_first_batches as skip_batches_of
from drivetrain_data.loader import SkippedBatches

logger = logging.getLogger(__name__)


class DataLoaderStateMixin:
    """The part of a loader that tells where its loop is.

    Attributes:
        end_of_dataloader: Whether the current batch is the epoch's last.
        remainder: The number of samples of the last step over all ranks; -1 if it is full, or unknown.
    """

    end_of_dataloader: bool = False
    remainder: int = -1

    def reset(self) -> None:
        """Forget where the last loop was."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Record that a loop begins."""
        self.reset()
        self.remainder = self._remainder()
        GradientState().add_dataloader(self)

    def end(self) -> None:
        """Record that the loop has ended."""
        GradientState().remove_dataloader(self)

    def _remainder(self) -> int:
        return -1


class DataLoaderAdapter(DataLoader[Any]):
    """A DataLoader whose batches come from drivetrain's sharded loader; other attributes are those of the user's.

    Args:
        dataset: The dataset to read.
        use_stateful_dataloader: Whether the loader has `state_dict`; ours always has.
        batch_sampler: The batches of this process.
        **kwargs: Further arguments of DataLoader.

    Attributes:
        base_dataloader: The user's DataLoader.
        sharded: The loader that yields this process's batches.
        iteration: The number of loops that have ended.
    """

    base_dataloader: DataLoader[Any]
    sharded: ShardedLoader[Any] | SkippedBatches[Any]
    iteration: int
    _is_accelerate_prepared: bool

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        del use_stateful_dataloader
        if batch_sampler is not None:
            kwargs["batch_sampler"] = batch_sampler
        base = DataLoader(dataset, **kwargs)
        self._set(base, shard_loader(base, Shard(0, 1)))

    @classmethod
    def over(cls, base: DataLoader[Any], sharded: ShardedLoader[Any] | SkippedBatches[Any]) -> Self:
        """Return the prepared form of a user's loader.

        Args:
            base: The loader as the user built it.
            sharded: The loader of this process's batches.
        """
        loader = cls.__new__(cls)
        loader._set(base, sharded)
        return loader

    def _set(self, base: DataLoader[Any], sharded: ShardedLoader[Any] | SkippedBatches[Any]) -> None:
        # DataLoader.__init__ is not called: the user's loader has checked its arguments.
        _sharded(sharded).may_interleave = True  # programs look at a batch in the middle of a loop
        self.__dict__.update(base_dataloader=base, sharded=sharded, iteration=0, _is_accelerate_prepared=True)

    def __getattr__(self, name: str) -> Any:
        if name in ("base_dataloader", "sharded"):  # not yet set
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __len__(self) -> int:
        """Return the number of this process's steps in an epoch."""
        return len(self.sharded)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride] DataLoader names its class
        """Yield this process's batches, on its device."""
        self._draw()
        yield from self.sharded

    def _draw(self) -> None:
        """Draw from the global generator what a loop over torch's DataLoader draws, the seed of its workers.

        Nothing is read with it: what follows, such as dropout's masks, is then drawn as with Accelerate. The rest of
        an epoch has its draw behind it, in the state of the generator that was loaded with the loader's.
        """
        base: Any = self.base_dataloader
        if isinstance(base, DataLoader) and base.generator is None and not _sharded(self.sharded).is_resumed:
            torch.empty((), dtype=torch.int64).random_()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a prepared loader cannot be copied or pickled; copy the DataLoader and prepare() the copy"
        )

    @property
    def full_batch_size(self) -> int | None:
        """The number of samples of a full batch on one rank, a batch sampler's own if it has one; None if unknown."""
        own = getattr(getattr(self.base_dataloader, "batch_sampler", None), "batch_size", None)
        return _sharded(self.sharded).batch_size or own

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was received, which any number of processes can load."""
        return _sharded(self.sharded).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a position: the next loop goes on from there."""
        _sharded(self.sharded).load_state_dict(state_dict)

    def begin_anew(self) -> None:
        """Forget the position in the epoch that was loaded: the next loop reads the epoch from its beginning."""
        sharded = _sharded(self.sharded)
        epoch = sharded.epoch
        sharded.set_epoch(epoch + 1)  # a loaded position is kept for its own epoch
        sharded.set_epoch(epoch)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: batches that were read ahead do not count as received."""


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """The loader of this process's part of the data.

    Args:
        dataset: The dataset to read.
        device: The device to copy batches to.
        rng_types: Not used: the order needs no generator to be synchronised.
        synchronized_generator: Not used, for the same reason.
        skip_batches: The number of batches to leave out of each epoch.
        use_stateful_dataloader: Whether the loader has `state_dict`; ours always has.
        _drop_last: Whether the incomplete last batch is dropped.
        _non_blocking: Whether to copy pinned batches without waiting.
        torch_device_mesh: The mesh of the parallel dimensions.
        iteration: The number of loops that have ended.
        **kwargs: Further arguments of DataLoader.
    """

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
        del rng_types, synchronized_generator, use_stateful_dataloader, _drop_last, torch_device_mesh
        base = DataLoader(dataset, **kwargs)
        sharded: Any = shard_loader(base, Shard(0, 1), device=device, non_blocking=_non_blocking)
        self._set(base, skip_batches_of(sharded, skip_batches) if skip_batches else sharded)
        self.iteration = iteration

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield this process's batches, and tell all that ask where the loop is."""
        self.begin()
        try:
            self._draw()
            for batch in self.sharded:
                current = _sharded(self.sharded).current
                self.end_of_dataloader = current is not None and current.is_last
                yield batch
        finally:
            self.iteration += 1
            self.end()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next loop, and tell the dataset if it wants to know."""
        self.iteration = epoch
        _sharded(self.sharded).set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def total_batch_size(self) -> int:
        """The number of samples of a full step over all ranks."""
        return (self.full_batch_size or 0) * _sharded(self.sharded).shard.count

    @property
    def total_dataset_length(self) -> int:
        """The number of samples of the dataset."""
        return len(self.dataset)  # pyright: ignore[reportArgumentType] torch's Dataset does not promise a length

    def get_sampler(self) -> Sampler[Any] | None:
        """Return the user's sampler, whose order this loader follows."""
        return getattr(self.base_dataloader, "sampler", None)

    def set_sampler(self, sampler: Sampler[Any]) -> None:
        """Refuse: the order was divided among the ranks when the loader was prepared.

        Raises:
            RuntimeError: Raised by every call.
        """
        raise RuntimeError(
            f"set_sampler({type(sampler).__name__}): the order of a prepared loader is divided among processes; "
            "build a DataLoader with the sampler and prepare() it"
        )

    def _remainder(self) -> int:
        total = self.total_batch_size
        if not total or not hasattr(self.dataset, "__len__"):
            return -1
        return self.total_dataset_length % total


class DataLoaderDispatcher(DataLoaderShard):
    """The loader of this process's part of data that the main process reads for all.

    Args:
        dataset: The dataset to read.
        split_batches: Whether the batch size is the sum over processes.
        skip_batches: The number of batches to leave out of each epoch.
        use_stateful_dataloader: Whether the loader has `state_dict`; ours always has.
        _drop_last: Whether the incomplete last batch is dropped.
        _non_blocking: Whether to copy pinned batches without waiting.
        slice_fn: Not used: drivetrain slices batches of any nesting.
        torch_device_mesh: The mesh of the parallel dimensions.
        iteration: The number of loops that have ended.
        **kwargs: Further arguments of DataLoader.
    """

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
        del split_batches, slice_fn
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            **kwargs,
        )


class SkipDataLoader(DataLoaderShard):
    """A loader whose epochs leave out their first batches.

    Args:
        dataset: The dataset to read.
        skip_batches: The number of batches to leave out of each epoch.
        use_stateful_dataloader: Whether the loader has `state_dict`; ours always has.
        **kwargs: Further arguments of DataLoader.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs
        )


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a prepared loader that leaves out the first batches of its epochs, without reading them.

    After `load_state` a loader goes on where the checkpoint left it, at any number of processes. Programs skip the
    batches that they have counted themselves: that loader comes back as it is.

    Args:
        dataloader: A prepared loader, or a DataLoader, which is then read by this process alone.
        num_batches: The number of batches to leave out on this process.
    """
    if not isinstance(dataloader, DataLoaderAdapter):
        dataloader = DataLoaderShard.over(dataloader, shard_loader(dataloader, Shard(0, 1)))
    try:
        skipping = skip_batches_of(dataloader.sharded, num_batches)
    except ResumedLoaderError:
        logger.info("skip_first_batches(%d): the loader goes on where the checkpoint left it", num_batches)
        return dataloader
    return type(dataloader).over(dataloader.base_dataloader, skipping)


def _sharded(loader: ShardedLoader[Any] | SkippedBatches[Any]) -> ShardedLoader[Any]:
    return loader.loader if isinstance(loader, SkippedBatches) else loader
