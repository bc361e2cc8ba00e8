"""Turn any loader into one shard of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from drivetrain_data.activity import ActiveLoaders
from drivetrain_data.broadcast import DispatchSource
from drivetrain_data.foreign import ForeignSource
from drivetrain_data.indexed import IndexedSource
from drivetrain_data.iterable import DealingCollate, StreamSource
from drivetrain_data.loader import ShardedLoader
from drivetrain_data.samplers import ItemSampler, OrderSampler, WholeBatchSampler
from drivetrain_data.settings import Even
from drivetrain_data.shard import Shard
from drivetrain_data.source import Source
from drivetrain_data.torch_samplers import order_of


def shard_loader(
    loader: Any,
    shard: Shard,
    *,
    device: torch.device | None = None,
    even: Even = "uneven",
    split_batches: bool = False,
    dispatch: bool | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    non_blocking: bool = True,
    read_ahead: bool = False,
    activity: ActiveLoaders | None = None,
    on_batch: Callable[[], None] | None = None,
) -> ShardedLoader[Any]:
    """Give one shard of a loader. Called on all ranks that share the data.

    Args:
        loader: A DataLoader, or any iterable with a `dataset`.
        shard: Which part.
        device: Where batches are copied; None leaves them on the CPU.
        even: What becomes of the tail of an epoch: "uneven" spreads it over the shards and repeats nothing that
            counts, "pad" repeats samples until all shards are full, "drop" leaves it out.
        split_batches: The loader's batch size is the sum over shards; by default it is that of each.
        dispatch: The group's first rank reads for all; None: where the loader cannot be sharded by index.
        group: The ranks that share the data; needed to dispatch.
        seed: What shuffled orders depend on, with the epoch.
        non_blocking: Copy pinned memory to the device without waiting.
        read_ahead: When dispatching, send a batch while the one before is computed on.
        activity: Told of every batch, to know which loader is being read.
        on_batch: Called for every batch.

    Raises:
        TypeError, ValueError: It is no loader, or the settings do not fit it; the message says which and why.
    """
    _check_loader(loader)
    dispatched = _is_dispatched(loader, shard, dispatch, group)
    plan = _ReadPlan(
        shard=shard,
        even="drop" if getattr(loader, "drop_last", False) else even,
        split=split_batches,
        seed=seed,
        for_all=dispatched,
    )
    source, batch_size = _read(loader, plan)
    if dispatched:
        assert group is not None
        source = DispatchSource(
            source, group=group, shard=shard, even=plan.even, device=device, read_ahead=read_ahead
        )
    return ShardedLoader(
        source,
        dataset=loader.dataset,
        shard=shard,
        batch_size=batch_size,
        device=device,
        non_blocking=non_blocking,
        activity=activity,
        on_batch=on_batch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadPlan:
    """How a loader is to be read."""

    shard: Shard
    even: Even
    split: bool
    seed: int
    for_all: bool


def _is_dispatched(loader: Any, shard: Shard, dispatch: bool | None, group: dist.ProcessGroup | None) -> bool:
    """Whether one rank reads for all: as asked, else where the loader cannot be sharded by index."""
    if dispatch and group is None and shard.count > 1:
        raise ValueError(
            "dispatch=True: the ranks that share the data are needed; pass their process group, group="
        )
    by_index = _is_stock(loader) and not isinstance(loader.dataset, IterableDataset)
    shared = group is not None and dist.get_world_size(group) > 1
    return shared and (not by_index if dispatch is None else dispatch)


def _check_loader(loader: Any) -> None:
    if isinstance(loader, ShardedLoader):
        raise ValueError("this loader is sharded already; pass the DataLoader that it was made from")
    if isinstance(loader, DataLoader):
        if not loader.in_order:
            raise ValueError(
                "in_order=False: batches would come in an order that can be neither resumed nor gathered; leave it"
                " out"
            )
    elif not (hasattr(loader, "__iter__") and hasattr(loader, "dataset")) or hasattr(loader, "__next__"):
        raise TypeError(
            f"{type(loader).__name__} is no loader; pass a torch DataLoader, or an iterable of batches with a "
            "`dataset` that starts anew with every loop"
        )


def _is_stock(loader: Any) -> bool:
    """Whether a loader reads as torch's does, so that its batches can be laid out anew."""
    if not isinstance(loader, DataLoader):
        return False
    kind = type(cast("Any", loader))
    if kind.__module__.startswith("torchdata.stateful_dataloader"):
        return not isinstance(cast("Any", loader).dataset, IterableDataset)
    own = set(kind.__mro__[: kind.__mro__.index(DataLoader)])
    return not any({"__iter__", "_get_iterator"} & set(vars(one)) for one in own)


def _read(loader: Any, plan: _ReadPlan) -> tuple[Source, int | None]:
    """The source of a loader's batches, and the samples of a batch on each shard."""
    if not _is_stock(loader):
        if plan.split:
            raise ValueError(
                f"split_batches=True: batches of {type(loader).__name__} are dealt out whole; leave it out"
            )
        return ForeignSource(loader, plan.shard, plan.even, seed=plan.seed, reads_for_all=plan.for_all), None
    if isinstance(loader.dataset, IterableDataset):
        return _read_stream(loader, plan)
    return _read_indexed(loader, plan)


def _read_stream(loader: DataLoader[Any], plan: _ReadPlan) -> tuple[Source, int | None]:
    size = None if loader.batch_size is None else _size_on_each(loader.batch_size, plan)
    if size is None and plan.split:
        raise ValueError(
            "split_batches=True: with batch_size=None there are no batches to split; leave it out"
        )
    collate = DealingCollate(loader.collate_fn, size, plan.shard, plan.even, reads_for_all=plan.for_all)
    generator = torch.Generator()

    def build(dataset: IterableDataset[Any]) -> DataLoader[Any]:
        return _rebuild(
            loader,
            dataset,
            generator,
            batch_size=(size or 1) * plan.shard.count,
            collate_fn=collate,
            drop_last=plan.even == "drop",
        )

    dataset = cast("IterableDataset[Any]", loader.dataset)
    source = StreamSource(build, dataset, collate, generator, num_workers=loader.num_workers, seed=plan.seed)
    return source, size


def _read_indexed(loader: DataLoader[Any], plan: _ReadPlan) -> tuple[Source, int | None]:
    dataset: Any = loader.dataset
    num_samples = len(dataset) if hasattr(dataset, "__len__") else None
    sampler, size = cast("Any", loader.sampler), loader.batch_size
    batches: Any = None
    if size is None and loader.batch_sampler is not None:
        batches = loader.batch_sampler
        if type(batches) is BatchSampler:
            sampler, size = batches.sampler, batches.batch_size
            if batches.drop_last:
                plan = replace(plan, even="drop")
            batches = None
    if batches is None and not hasattr(sampler, "__len__"):
        if size is None:
            raise ValueError(
                f"batch_size=None with {type(sampler).__name__}, which has no length; give it __len__"
            )
        batches = BatchSampler(sampler, size, drop_last=plan.even == "drop")
    if batches is not None:
        laid_out: Any = WholeBatchSampler(
            batches,
            seed=plan.seed,
            size=num_samples,
            shard=plan.shard,
            even=plan.even,
            split=plan.split,
            reads_for_all=plan.for_all,
        )
        layout, size = {"batch_sampler": laid_out}, None
    elif size is None:
        if plan.split:
            raise ValueError(
                "split_batches=True: with batch_size=None there are no batches to split; leave it out"
            )
        order = order_of(sampler, seed=plan.seed, num_samples=num_samples)
        laid_out = ItemSampler(order, 1, plan.shard, plan.even, reads_for_all=plan.for_all)
        layout = {"sampler": laid_out, "batch_size": None}
    else:
        order = order_of(sampler, seed=plan.seed, num_samples=num_samples)
        size = _size_on_each(size, plan)
        laid_out = OrderSampler(order, size, plan.shard, plan.even, reads_for_all=plan.for_all)
        layout = {"batch_sampler": laid_out}
        _check_drop(laid_out)
    generator = torch.Generator()
    rebuilt = _rebuild(loader, dataset, generator, collate_fn=loader.collate_fn, **layout)
    return IndexedSource(rebuilt, laid_out, generator), size


def _size_on_each(batch_size: int, plan: _ReadPlan) -> int:
    if not plan.split:
        return batch_size
    if batch_size % plan.shard.count:
        raise ValueError(
            f"split_batches=True: batch_size={batch_size} must be a multiple of the {plan.shard.count} shards"
        )
    return batch_size // plan.shard.count


def _check_drop(sampler: OrderSampler) -> None:
    partition = sampler.partition(0)
    if partition.stop > 0 and partition.num_steps == 0:
        raise ValueError(
            f"{partition.stop} samples are fewer than one batch of {partition.batch_size} on each of "
            f"{partition.num_shards} shards, and the tail is dropped: nothing would be left; use a smaller batch, "
            'or even="uneven" without drop_last'
        )


def _rebuild(
    loader: DataLoader[Any], dataset: Any, generator: torch.Generator, **layout: Any
) -> DataLoader[Any]:
    """A DataLoader that fetches, pins and works as the user's does, with another layout."""
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
