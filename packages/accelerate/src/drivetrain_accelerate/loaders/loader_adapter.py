"""The base of prepared loaders: drivetrain's sharded loader in the form of a torch DataLoader."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from drivetrain_accelerate.libraries.availability import is_torchdata_stateful_dataloader_available
from drivetrain_accelerate.loaders.batch_shards import BatchSamplerShard, SkipBatchSampler
from drivetrain_accelerate.states.gradient_state import DataPosition, GradientState
from drivetrain_accelerate.tensors.nested_tensors import with_values
from drivetrain_data import Shard, ShardedLoader, shard_loader, skip_first_batches
from drivetrain_data.skipping_view import SkippedBatches
from drivetrain_data.sources.torch_loader import is_stock, rebuild
from drivetrain_data.state.torchdata_state import torchdata_kind
from drivetrain_data.torchdata_view import TorchdataView


class DataLoaderStateMixin:
    """The methods that report a loop over a loader to the gradient state."""

    end_of_dataloader: bool = False  # whether the current batch is the epoch's last
    remainder: int = -1  # samples of the last step over all ranks; -1 if it is full, or unknown

    def reset(self) -> None:
        """Forget the position of the last loop."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Record that a loop begins."""
        self.reset()
        GradientState().add_dataloader(self)

    def end(self) -> None:
        """Record that the loop has ended."""
        GradientState().remove_dataloader(self)


class DataLoaderAdapter(DataLoader[Any]):
    """A DataLoader with the batches of drivetrain's sharded loader and the other attributes of the user's loader."""

    users_loader: DataLoader[Any]
    base_dataloader: DataLoader[Any]  # whose attributes this one shows
    sharded: ShardedLoader[Any] | SkippedBatches[Any]  # which yields this process's batches
    iteration: int  # loops that have read their epoch to its end
    device: torch.device | None  # None leaves batches on the CPU
    rng_types: list[Any]  # empty: the order needs no generator to be synchronised
    synchronized_generator: torch.Generator | None
    use_stateful_dataloader: bool
    adds_shift_labels: bool = (
        False  # to batches, for loops that average losses over parts of sequences themselves
    )
    _is_accelerate_prepared: bool

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        if batch_sampler is not None:
            kwargs["batch_sampler"] = batch_sampler
        base = build_loader(use_stateful_dataloader, dataset, **kwargs)
        self._set(base, shard_loader(base, Shard(0, 1)))

    @classmethod
    def over(
        cls,
        base: DataLoader[Any],
        sharded: ShardedLoader[Any] | SkippedBatches[Any],
        device: torch.device | None = None,
    ) -> Self:
        """Return the prepared form of a user's loader."""
        loader = cls.__new__(cls)
        loader._set(base, sharded, device)
        return loader

    def _set(
        self,
        base: DataLoader[Any],
        sharded: ShardedLoader[Any] | SkippedBatches[Any],
        device: torch.device | None = None,
        skip_batches: int = 0,
    ) -> None:
        # DataLoader.__init__ is not called: the user's loader has checked its arguments.
        if skip_batches:
            sharded = skip_first_batches(sharded, skip_batches)
        sharded_of(sharded).may_interleave = True  # programs look at a batch in the middle of a loop
        self.__dict__.update(
            users_loader=base,
            base_dataloader=_make_shown_loader(base, sharded),
            sharded=sharded,
            device=device,
            iteration=0,
            rng_types=[],
            synchronized_generator=None,
            use_stateful_dataloader=torchdata_kind(base) is not None,
            _is_accelerate_prepared=True,
        )

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] as isinstance asks for it
        """The class for isinstance: that of torchdata's loader if the user's loader is one, or else the own class."""
        return torchdata_kind(self.users_loader) or type(self)

    def __getattr__(self, name: str) -> Any:
        if name in ("users_loader", "base_dataloader", "sharded"):  # not yet set
            raise AttributeError(name)
        shown = self.base_dataloader
        return getattr(shown if hasattr(shown, name) else self.users_loader, name)

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
        """Draw a seed from the global generator, as torch's DataLoader does for its workers in every loop."""
        # Nothing is read with it: dropout's masks, for one, are then drawn as with Accelerate. The rest of an epoch
        # has its draw behind it, in the state of the generator that was loaded with the loader's.
        base: Any = self.users_loader
        is_resumed = sharded_of(self.sharded).is_resumed
        if isinstance(base, DataLoader) and base.generator is None and not is_resumed:
            torch.empty((), dtype=torch.int64).random_()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a prepared loader cannot be copied or pickled; copy the DataLoader and prepare() the copy"
        )

    @property
    def gradient_state(self) -> GradientState:
        """The gradient state, which all loaders share."""
        return GradientState()

    @property
    def batch_sampler(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride] torch's is an attribute
        """The batches of indices of this process, with the present treatment of an uneven tail."""
        shown = self.base_dataloader.batch_sampler
        if isinstance(shown, BatchSamplerShard):
            shown.even_batches = sharded_of(self.sharded).even != "uneven"
        return shown

    @property
    def skip_batches(self) -> int:
        """The number of batches that each epoch of the loader skips."""
        return self.sharded.num_batches if isinstance(self.sharded, SkippedBatches) else 0

    @property
    def drops_last(self) -> bool:
        """True if an incomplete last batch is dropped."""
        base = self.users_loader
        return any(getattr(each, "drop_last", False) for each in (base, getattr(base, "batch_sampler", None)))

    @property
    def full_batch_size(self) -> int | None:
        """The number of samples in a full batch on one rank, by the batch sampler or the loader; None if unknown."""
        own = getattr(getattr(self.users_loader, "batch_sampler", None), "batch_size", None)
        return sharded_of(self.sharded).batch_size or own

    @property
    def data_position(self) -> DataPosition:
        """The position of the current loop in the loader's data."""
        sharded = sharded_of(self.sharded)
        return {"epoch": sharded.epoch, "position": sharded.position, "stride": sharded.position_after(1)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was received.

        Any number of processes can load it. With `use_stateful_dataloader`, it has the form of torchdata's state.
        """
        sharded = sharded_of(self.sharded)
        return TorchdataView(sharded).state_dict() if self.use_stateful_dataloader else sharded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a position: the next loop goes on from there."""
        sharded = sharded_of(self.sharded)
        if self.use_stateful_dataloader and "format" not in state_dict:
            TorchdataView(sharded).load_state_dict(state_dict)
        else:
            sharded.load_state_dict(state_dict)

    def begin_anew(self) -> None:
        """Forget a loaded position in the epoch: the next loop reads the epoch from its beginning."""
        sharded = sharded_of(self.sharded)
        epoch = sharded.epoch
        sharded.set_epoch(epoch + 1)  # a loaded position is kept for its own epoch
        sharded.set_epoch(epoch)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: batches that were read ahead do not count as received."""


def with_shift_labels(batch: Any) -> Any:
    """Return a batch with labels, of shape (batch, positions), and their `shift_labels`: of the next position."""
    if not isinstance(batch, Mapping) or "labels" not in batch or "shift_labels" in batch:
        return batch
    shifted = functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    return with_values(batch, {**batch, "shift_labels": shifted})


def sharded_of(loader: ShardedLoader[Any] | SkippedBatches[Any]) -> ShardedLoader[Any]:
    """Return the sharded loader itself if the given one is a view that skips batches."""
    return loader.loader if isinstance(loader, SkippedBatches) else loader


def _make_shown_loader(loader: Any, sharded: ShardedLoader[Any] | SkippedBatches[Any]) -> Any:
    """Return a loader that lends its attributes to the prepared loader. No batch is read through it."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if not is_stock(loader) or isinstance(loader.dataset, IterableDataset) or batches is None:
        return loader
    whole = sharded_of(sharded)
    if whole.shard.count > 1 and not whole.is_dispatched:
        batches = BatchSamplerShard(
            batches, whole.shard.count, whole.shard.index, whole.splits_batches, whole.even != "uneven"
        )
    if isinstance(sharded, SkippedBatches):
        batches = SkipBatchSampler(batches, sharded.num_batches)
    return rebuild(loader, loader.dataset, loader.generator, batch_sampler=batches)


def _find_stateful_kind() -> type[DataLoader[Any]]:
    """Return torchdata's class; raise an ImportError if torchdata is missing or too old."""
    if not is_torchdata_stateful_dataloader_available():
        raise ImportError(
            "use_stateful_dataloader=True: torchdata 0.8 or newer is not installed; pip install 'torchdata>=0.8', or "
            "leave it out: a prepared loader has state_dict() without it"
        )
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def make_stateful(loader: Any) -> DataLoader[Any]:
    """Return torchdata's loader with the data and options of a torch DataLoader."""
    kind = _find_stateful_kind()
    if isinstance(loader, kind):
        return loader
    if not is_stock(loader):
        raise ValueError(
            f"use_stateful_dataloader=True: {type(loader).__name__} reads in a way of its own, which "
            "torchdata's loader does not have: pass a DataLoader, or leave it out"
        )
    layout: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if isinstance(loader.dataset, IterableDataset):
        layout = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        layout = {"batch_size": None, "sampler": loader.sampler}
    return rebuild(loader, loader.dataset, loader.generator, kind, **layout)


def build_loader(use_stateful_dataloader: bool, dataset: Any, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader of torchdata if `use_stateful_dataloader` is true, or else of torch."""
    return (_find_stateful_kind() if use_stateful_dataloader else DataLoader)(dataset, **options)
