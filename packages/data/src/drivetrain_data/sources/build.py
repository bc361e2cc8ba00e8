"""Build the source that reads a loader for a shard."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from drivetrain_data.collective_errors import Agree, check_agreement
from drivetrain_data.randomness.worker_seeds import LoopSeededDataset, LoopSeedSampler
from drivetrain_data.sampling.batch_sampler import WholeBatchSampler
from drivetrain_data.sampling.block_shuffle import IndexFunction
from drivetrain_data.sampling.order import Order
from drivetrain_data.sampling.samplers import ItemSampler, OrderSampler
from drivetrain_data.sampling.torch_samplers import block_order_of, check_undivided, order_of
from drivetrain_data.settings import ShardingStrategy, UnevenPolicy
from drivetrain_data.shard import Shard
from drivetrain_data.sources.base import BatchSource
from drivetrain_data.sources.external import ForeignSource
from drivetrain_data.sources.iterable import DealingCollate, StreamSource
from drivetrain_data.sources.map_style import IndexedSource
from drivetrain_data.state.integrations import check_undivided_stream, left_out_of_state, shuffles_unseeded
from drivetrain_data.state.sampler_objects import length_of
from drivetrain_data.state.stream_state import EpochReader, EpochStream, Snapshots

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A plan of how to read a loader.

    Attributes:
        shard: The shard to read for.
        even: The treatment of an epoch's tail.
        split: Whether the loader's batch size is the sum over shards.
        strategy: The assignment of samples to shards.
        num_blocks: The number of blocks of data that shards keep to; 1 if they take turns over all of it.
        seed: The seed of shuffled orders.
        for_all: Whether one rank reads for all shards.
        group: The process group of the ranks that share the data; None if unknown.
    """

    shard: Shard
    even: UnevenPolicy
    split: bool
    strategy: ShardingStrategy | IndexFunction
    num_blocks: int
    seed: int
    for_all: bool
    group: dist.ProcessGroup | None = None

    @property
    def in_blocks(self) -> bool:
        """True if shards keep to blocks of the data."""
        return self.strategy != "interleaved"

    @property
    def agree(self) -> Agree | None:
        """The check that all ranks draw the same; None if only one rank draws or the group is unknown."""
        if self.group is None or self.for_all or dist.get_world_size(self.group) == 1:
            return None
        return partial(check_agreement, self.group)

    def check_interleaved(self, what: str) -> None:
        """Check that the strategy is "interleaved", for a loader that cannot be sharded by index.

        Raises:
            ValueError: The strategy is another one; the message gives the reason `what`.
        """
        if self.in_blocks:
            raise ValueError(
                f"strategy={_said(self.strategy)}: {what}; leave it out for this loader, or say 'interleaved'"
            )


def source_of(loader: Any, plan: ReadPlan) -> tuple[BatchSource, int | None]:
    """Return the source of a loader's batches, and the batch size on each shard (None for whole batches)."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        check_undivided_stream(loader.dataset, alone=plan.shard.count == 1 and not plan.for_all)
    if not is_stock(loader):
        for name in ("sampler", "batch_sampler"):
            check_undivided(getattr(loader, name, None))
        if plan.split:
            raise ValueError(
                f"split_batches=True: batches of {type(loader).__name__} are dealt out whole; leave it out"
            )
        plan.check_interleaved(f"the batches of {type(loader).__name__} are dealt out in turn")
        return ForeignSource(loader, plan.shard, plan.even, seed=plan.seed, reads_for_all=plan.for_all), None
    if isinstance(loader.dataset, IterableDataset):
        return _read_stream(loader, plan)
    return _read_indexed(loader, plan)


def is_stock(loader: Any) -> bool:
    """Return whether a loader reads as torch's DataLoader does, so that it can be rebuilt with another sampler."""
    if not isinstance(loader, DataLoader):
        return False
    kind = type(cast("Any", loader))
    if kind.__module__.startswith("torchdata.stateful_dataloader"):
        return not isinstance(cast("Any", loader).dataset, IterableDataset)
    own = set(kind.__mro__[: kind.__mro__.index(DataLoader)])
    return not any({"__iter__", "_get_iterator"} & set(vars(one)) for one in own)


def _read_stream(loader: DataLoader[Any], plan: ReadPlan) -> tuple[BatchSource, int | None]:
    plan.check_interleaved("an iterable dataset is dealt out in turn")
    size = None if loader.batch_size is None else _size_on_each(loader.batch_size, plan)
    if size is None and plan.split:
        raise ValueError(
            "split_batches=True: with batch_size=None there are no batches to split; leave it out"
        )
    dataset = cast("IterableDataset[Any]", loader.dataset)
    _check_seeded(dataset, plan)
    left_out = left_out_of_state(dataset, loader.num_workers)
    stride = (size or 1) * plan.shard.count
    reader = EpochReader(
        dataset,
        num_workers=loader.num_workers,
        stride=stride,
        persistent=loader.persistent_workers,
        trusted=left_out is None,
    )
    snapshots = Snapshots(dataset if loader.num_workers == 0 else None, trusted=left_out is None)
    collate = DealingCollate(
        loader.collate_fn,
        size,
        plan.shard,
        plan.even,
        reads_for_all=plan.for_all,
        snapshots=snapshots,
    )
    generator = torch.Generator()

    def build() -> DataLoader[Any]:
        return _rebuild(
            loader,
            EpochStream(reader),
            generator,
            batch_size=stride,
            collate_fn=collate,
            drop_last=plan.even == "drop",
        )

    source = StreamSource(
        build,
        reader,
        collate,
        generator,
        num_workers=loader.num_workers,
        seed=plan.seed,
        left_out=left_out,
    )
    return source, size


def _check_seeded(dataset: Any, plan: ReadPlan) -> None:
    """Check that only one rank reads a stream shuffled without a seed, whose order differs between processes.

    A warning says that such a stream cannot be resumed in the middle of an epoch.

    Raises:
        ValueError: Several ranks read the stream.
    """
    if not shuffles_unseeded(dataset):
        return
    name = type(dataset).__name__
    if plan.shard.count > 1 and not plan.for_all:
        raise ValueError(
            f"{name} is shuffled without a seed, so in another order on each of {plan.shard.count} ranks that read "
            "it: give its shuffle() a seed=, or let one rank read for all, with dispatch=True"
        )
    if plan.shard.index == 0:
        logger.warning(
            "%s is shuffled without a seed: an epoch cannot be resumed in its middle; give its shuffle() a seed=",
            name,
        )


def _read_indexed(loader: DataLoader[Any], plan: ReadPlan) -> tuple[BatchSource, int | None]:
    dataset: Any = loader.dataset
    num_samples = length_of(dataset)
    reads = _reads_by(loader, drop_last=plan.even == "drop")
    plan = replace(plan, even="drop") if reads.drop_last else plan
    size = None
    if reads.batches is not None:
        laid_out: Any = _lay_out_batches(reads.batches, plan, num_samples)
        layout: dict[str, Any] = {}
    elif reads.batch_size is None:
        laid_out = _lay_out_items(reads.sampler, plan, num_samples)
        layout = {"batch_size": None}
    else:
        size = _size_on_each(reads.batch_size, plan)
        order = _order(reads.sampler, plan, num_samples)
        laid_out = OrderSampler(
            order, size, plan.shard, plan.even, reads_for_all=plan.for_all, agree=plan.agree
        )
        _check_drop(laid_out)
        layout = {}
    seeds = LoopSeedSampler(laid_out) if loader.persistent_workers else None
    layout["sampler" if "batch_size" in layout else "batch_sampler"] = laid_out if seeds is None else seeds
    generator = torch.Generator()
    rebuilt = _rebuild(
        loader,
        dataset if seeds is None else LoopSeededDataset(dataset),
        generator,
        collate_fn=loader.collate_fn,
        **layout,
    )
    return IndexedSource(rebuilt, laid_out, generator, loop_seeds=seeds, dataset=dataset), size


class _ReadsBy(NamedTuple):
    """The way a DataLoader reads: by a sampler and a batch size (None: no batching), or by a user's batch sampler."""

    sampler: Any
    batch_size: int | None
    batches: Any
    drop_last: bool


def _reads_by(loader: DataLoader[Any], *, drop_last: bool) -> _ReadsBy:
    batches: Any = None if loader.batch_size is not None else loader.batch_sampler
    sampler, size = cast("Any", loader.sampler), loader.batch_size
    if type(batches) is BatchSampler:  # equivalent to its sampler and a batch size
        sampler, size, drop_last = batches.sampler, batches.batch_size, drop_last or batches.drop_last
        batches = None
    if batches is None and not hasattr(sampler, "__len__"):
        if size is None:
            raise ValueError(
                f"batch_size=None with {type(sampler).__name__}, which has no length; give it __len__"
            )
        batches = BatchSampler(sampler, size, drop_last=drop_last)
    return _ReadsBy(sampler, size, batches, drop_last)


def _lay_out_batches(batches: Any, plan: ReadPlan, num_samples: int | None) -> WholeBatchSampler:
    plan.check_interleaved(f"the batches of {type(batches).__name__} are dealt out whole")
    check_undivided(batches)
    if plan.split and plan.even == "pad":
        raise ValueError(
            f"even='pad' with split_batches=True: batches of {type(batches).__name__} have sizes of their own, and "
            "are split as they are; use even='uneven', or a batch_size instead of the batch sampler"
        )
    sampler = WholeBatchSampler(
        batches,
        seed=plan.seed,
        size=num_samples,
        shard=plan.shard,
        even=plan.even,
        split=plan.split,
        reads_for_all=plan.for_all,
        agree=plan.agree,
    )
    count = length_of(batches)
    if plan.even == "drop" and count and not len(sampler):
        _tell_empty(f"{count} batches are fewer than one", plan.shard)
    return sampler


def _lay_out_items(sampler: Any, plan: ReadPlan, num_samples: int | None) -> ItemSampler:
    if plan.split:
        raise ValueError(
            "split_batches=True: with batch_size=None there are no batches to split; leave it out"
        )
    order = _order(sampler, plan, num_samples)
    laid_out = ItemSampler(order, 1, plan.shard, plan.even, reads_for_all=plan.for_all, agree=plan.agree)
    _check_drop(laid_out)
    return laid_out


def _order(sampler: Any, plan: ReadPlan, num_samples: int | None) -> Order:
    if not plan.in_blocks:
        return order_of(sampler, seed=plan.seed, num_samples=num_samples)
    if plan.for_all:
        plan.check_interleaved("one rank reads for all, and none has data of its own")
    function = plan.strategy if callable(plan.strategy) else None
    return block_order_of(
        sampler,
        plan.num_blocks,
        seed=plan.seed,
        num_samples=num_samples,
        strategy=_said(plan.strategy),
        function=function,
        tells=plan.shard.index == 0,
    )


def _size_on_each(batch_size: int, plan: ReadPlan) -> int:
    if not plan.split:
        return batch_size
    if batch_size % plan.shard.count:
        raise ValueError(
            f"split_batches=True: batch_size={batch_size} must be a multiple of the {plan.shard.count} shards"
        )
    return batch_size // plan.shard.count


def _check_drop(sampler: OrderSampler) -> None:
    partition = sampler.partition(0, 0)
    if partition.stop > 0 and partition.num_steps == 0:
        samples = f"{partition.stop} samples are fewer than one batch of {partition.batch_size}"
        _tell_empty(samples, sampler.shard)


def _tell_empty(what: str, shard: Shard) -> None:
    """Warn on the first shard that epochs have no steps; torch's loader with `drop_last` is empty then too."""
    if shard.index == 0:
        logger.warning(
            "%s on each of %d shards, and the tail is dropped: every epoch of this loader is empty; use a smaller "
            'batch, or even="uneven" without drop_last',
            what,
            shard.count,
        )


def _rebuild(
    loader: DataLoader[Any], dataset: Any, generator: torch.Generator, **layout: Any
) -> DataLoader[Any]:
    """Return a DataLoader with the user's workers, pinning and other options, but another sampler layout."""
    if loader.pin_memory_device:
        layout["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        dataset,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **layout,
    )


def _said(strategy: ShardingStrategy | IndexFunction) -> str:
    return (
        repr(strategy)
        if isinstance(strategy, str)
        else getattr(strategy, "__name__", type(strategy).__name__)
    )
