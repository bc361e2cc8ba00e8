"""Turn any loader into one shard of it."""

from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from drivetrain_data.active_loaders import ActiveLoaders
from drivetrain_data.device_prefetch import DeviceCopies
from drivetrain_data.loader import ShardedLoader
from drivetrain_data.sampling.block_shuffle import IndexFunction
from drivetrain_data.sampling.torch_samplers import check_undivided
from drivetrain_data.settings import DataSettings, Even, Strategy
from drivetrain_data.shard import Shard
from drivetrain_data.sources.base import Source
from drivetrain_data.sources.build import ReadPlan, is_stock, source_of
from drivetrain_data.sources.rank0_dispatch import DispatchSource
from drivetrain_data.state.integrations import check_undivided_stream


def shard_loader(
    loader: Any,
    shard: Shard,
    *,
    device: torch.device | str | None = None,
    even: Even = "uneven",
    strategy: Strategy | IndexFunction = "interleaved",
    num_nodes: int | None = None,
    split_batches: bool = False,
    dispatch: bool | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    seed_source: str = "",
    non_blocking: bool = True,
    copy_ahead: int = 1,
    read_ahead: bool = False,
    activity: ActiveLoaders | None = None,
    on_batch: Callable[[], None] | None = None,
) -> ShardedLoader[Any]:
    """Give one shard of a loader. Called on all ranks that share the data.

    Args:
        loader: A DataLoader, or any iterable of batches with a `dataset`, or with a state of its own.
        shard: Which part.
        device: Where batches are copied; None leaves them on the CPU.
        even: An epoch's tail: "uneven" repeats nothing that counts, "pad" fills all shards, "drop" leaves it out.
        strategy: Who reads which samples: by turns, a block for each shard or node, or a function (position, shard).
        num_nodes: For "node", which needs it: how many nodes there are; each has equally many neighbouring shards.
        split_batches: The loader's batch size is the sum over shards; by default it is that of each.
        dispatch: The group's first rank reads for all; None: where the loader cannot be sharded by index.
        group: The ranks that share the data; needed to dispatch, and to compare what they draw as an epoch begins.
        seed: What shuffled orders depend on, with the epoch. It must be the same on all ranks, so it is not taken
            from the loader's generators or torch's; one rank's `own_seed(loader)` or `torch.initial_seed()` may be
            given.
        seed_source: Who said the seed, for `ShardedLoader.seed_source`.
        non_blocking: Copy pinned memory to the device without waiting.
        copy_ahead: Batches copied to the device before the loop asks for them.
        read_ahead: When dispatching, send a batch while the one before is computed on.
        activity: Told of every batch, to know which loader is being read.
        on_batch: Called for every batch.

    Raises:
        TypeError, ValueError: It is no loader, or the settings do not fit it; the message says which and why.
    """
    _check(loader, shard, even, seed, copy_ahead)
    tail = "drop" if getattr(loader, "drop_last", False) else even
    for_all = _is_dispatched(loader, shard, dispatch, group)
    num_blocks = _num_blocks(strategy, shard, num_nodes)
    plan = ReadPlan(shard, tail, split_batches, strategy, num_blocks, seed, for_all, group)
    source, batch_size = source_of(loader, plan)
    return ShardedLoader(
        _handed_out(source, plan, group, device, read_ahead) if plan.for_all else source,
        dataset=getattr(loader, "dataset", None),
        shard=shard,
        batch_size=batch_size,
        copies=_copies(device, non_blocking, copy_ahead),
        activity=activity,
        on_batch=on_batch,
        seed_source=seed_source,
    )


def _copies(device: torch.device | str | None, non_blocking: bool, num_ahead: int) -> DeviceCopies | None:
    """Copies to a device; what a loader gives lies on the CPU already."""
    place = torch.device("cpu" if device is None else device)
    if place.type == "cpu":
        return None
    return DeviceCopies(place, non_blocking=non_blocking, num_ahead=num_ahead)


def _num_blocks(strategy: Strategy | IndexFunction, shard: Shard, num_nodes: int | None) -> int:
    """Into how many blocks a strategy divides the data."""
    if not callable(strategy) and strategy not in get_args(Strategy):
        raise ValueError(
            f"strategy={strategy!r}: must be one of {', '.join(get_args(Strategy))}, or a function of "
            "(position, shard) that returns an index"
        )
    if num_nodes is None:
        if strategy == "node" and shard.count > 1:
            raise ValueError(
                f"strategy='node': over how many nodes the {shard.count} shards lie is not known; say num_nodes="
            )
        num_nodes = 1
    if strategy == "node" and (num_nodes < 1 or shard.count % num_nodes):
        raise ValueError(
            f"strategy='node': {shard.count} shards over num_nodes={num_nodes}: every node needs equally many"
        )
    if strategy == "interleaved":
        return 1
    return num_nodes if strategy == "node" else shard.count


def _is_dispatched(loader: Any, shard: Shard, dispatch: bool | None, group: dist.ProcessGroup | None) -> bool:
    """Whether one rank reads for all: as asked, else where the loader cannot be sharded by index."""
    if dispatch and group is None and shard.count > 1:
        raise ValueError(
            "dispatch=True: the ranks that share the data are needed; pass their process group, group="
        )
    by_index = is_stock(loader) and not isinstance(loader.dataset, IterableDataset)
    shared = group is not None and dist.get_world_size(group) > 1
    return shared and (not by_index if dispatch is None else dispatch)


def _handed_out(
    source: Source,
    plan: ReadPlan,
    group: dist.ProcessGroup | None,
    device: torch.device | str | None,
    read_ahead: bool,
) -> Source:
    """What the group's first rank reads, on all of its ranks."""
    assert group is not None
    place = None if device is None else torch.device(device)
    return DispatchSource(source, group=group, shard=plan.shard, device=place, read_ahead=read_ahead)


def _check(loader: Any, shard: Shard, even: Even, seed: int, copy_ahead: int) -> None:
    if type(shard) is not Shard:
        raise TypeError(f"shard={shard!r}: must be a Shard, as Shard(rank, world_size)")
    if seed is None:  # pyright: ignore[reportUnnecessaryComparison] a user may give any
        raise ValueError("seed=None: ranks could not agree on one; say an integer between 0 and 2**63 - 1")
    DataSettings(even=even, seed=seed, copy_ahead=copy_ahead)  # checks them
    if isinstance(loader, ShardedLoader):
        raise ValueError("this loader is sharded already; pass the DataLoader that it was made from")
    if isinstance(loader, DataLoader):
        if not loader.in_order:
            raise ValueError(
                "in_order=False: batches would come in an order that can be neither resumed nor gathered; leave it"
                " out"
            )
    elif not is_loader(loader) or hasattr(loader, "__next__"):
        raise TypeError(
            f"{type(loader).__name__} is no loader; pass a torch DataLoader, or an iterable of batches that starts "
            "anew with every loop and has a `dataset`, or state_dict and load_state_dict"
        )


def is_loader(obj: object) -> bool:
    """Whether an object is taken for a loader: an iterable over a `dataset`, or one that knows where it stands."""
    stateful = hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")
    return hasattr(obj, "__iter__") and (hasattr(obj, "dataset") or stateful)


def divides_itself(loader: Any) -> bool:
    """Whether an unprepared loader gives each rank a part of its own, by what is seen of its sampler or stream."""
    try:
        for name in ("sampler", "batch_sampler"):
            check_undivided(getattr(loader, name, None))
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            check_undivided_stream(loader.dataset, alone=False)
    except ValueError:
        return True
    return False
