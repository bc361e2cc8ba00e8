"""Turn any loader into a loader of one of its shards."""

from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from drivetrain_data.active_loaders import LoaderTracker
from drivetrain_data.device_prefetch import DeviceCopies
from drivetrain_data.loader import ShardedLoader
from drivetrain_data.sampling.block_shuffle import IndexFunction
from drivetrain_data.sampling.known_samplers import check_undivided
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.settings import DataSettings, ShardingStrategy, UnevenPolicy
from drivetrain_data.shard import Shard
from drivetrain_data.sources.batch_source import BatchSource
from drivetrain_data.sources.external import ExternalSource
from drivetrain_data.sources.first_samples import check_map_style
from drivetrain_data.sources.iterable import IterableSource
from drivetrain_data.sources.map_style import MapStyleSource
from drivetrain_data.sources.rank0_dispatch import Rank0Dispatch
from drivetrain_data.sources.torch_loader import is_stock
from drivetrain_data.state.integrations import check_undivided_stream


def shard_loader(
    loader: Any,
    shard: Shard,
    *,
    device: torch.device | str | None = None,
    even: UnevenPolicy = "uneven",
    strategy: ShardingStrategy | IndexFunction = "interleaved",
    num_nodes: int | None = None,
    split_batches: bool = False,
    dispatch: bool | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    seed_source: str = "",
    compare_samples: bool = True,
    draws_apart: bool = False,
    non_blocking: bool = True,
    copy_ahead: int = 1,
    read_ahead: bool = False,
    activity: LoaderTracker | None = None,
    on_batch: Callable[[], None] | None = None,
) -> ShardedLoader[Any]:
    """Return the loader of one shard of a loader's data. Called on all ranks that share the data.

    Args:
        loader: A DataLoader, or any iterable of batches that has a `dataset`, or `state_dict` and `load_state_dict`.
        shard: The shard that this rank reads.
        device: The device to copy batches to; None leaves them on the CPU.
        even: The treatment of a tail: "uneven" repeats no sample, "pad" fills it with repeats, "drop" drops it.
        strategy: "interleaved"; a "block" per shard or per "node"; or a function from (position, shard) to an index.
        num_nodes: The number of nodes, required for "node"; each node has equally many consecutive shards.
        split_batches: Whether the loader's batch size is the sum over shards; by default the size on each shard.
        dispatch: Whether the group's first rank reads for all; None: only if a loader cannot be sharded by index.
        group: The ranks' process group; required to dispatch, and used to check that all ranks have the same data.
        seed: The seed of shuffled orders, the same on all ranks, such as one rank's `own_seed(loader)`.
        seed_source: The origin of the seed, for `ShardedLoader.seed_source`.
        compare_samples: Whether ranks compare samples: now, or a stream's in its first loop, unless `dispatch=True`.
        draws_apart: Whether a map-style dataset without workers draws random numbers apart from the program.
        non_blocking: Whether to copy pinned memory to the device without waiting.
        copy_ahead: The number of batches to copy to the device before the loop asks for them.
        read_ahead: Whether to send the next batch while ranks compute on the current one, when dispatching.
        activity: The stack of active loaders to update for every batch.
        on_batch: A callback to call for every batch.

    Raises:
        TypeError, ValueError: No loader, settings that do not fit it, no such device, or ranks with different data.

    Example:
        >>> loader = DataLoader(range(10), batch_size=2)
        >>> [batch.tolist() for batch in shard_loader(loader, Shard(0, 2))]
        [[0, 1], [4, 5], [8]]
    """
    _check(loader, shard, even, seed, copy_ahead)
    if dispatch and group is None and shard.count > 1:
        raise ValueError(
            "dispatch=True: the ranks that share the data are needed; pass their process group, group="
        )
    is_shared = group is not None and dist.get_world_size(group) > 1
    by_index = is_stock(loader) and not isinstance(loader.dataset, IterableDataset)
    readers = (loader, getattr(loader, "batch_sampler", None))
    sharding = DataSharding(
        shard=shard, even="drop" if any(getattr(reader, "drop_last", False) for reader in readers) else even,
        split=split_batches, seed=seed, group=group, draws_apart=draws_apart,
        strategy=strategy, num_blocks=_num_blocks(strategy, shard, num_nodes),
        for_all=is_shared and (not by_index if dispatch is None else dispatch),
        compares_streams=compare_samples and group is not None and not dispatch,
    )  # fmt: skip
    source = _source_of(loader, sharding, compare_samples=compare_samples)
    try:
        target = torch.device("cpu" if device is None else device)
        torch.empty(0, device=target)  # torch would refuse an absent one only in the first loop
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(f"device={device!r}: must be one of this machine, such as 'cpu'; {error}") from error
    copies = stage = None
    if target.type != "cpu":  # where a loader's batches already are
        copies = DeviceCopies(target, non_blocking=non_blocking, num_ahead=copy_ahead)
    if sharding.for_all and group is not None:
        stage = Rank0Dispatch(group, shard, device=target, read_ahead=read_ahead)
    return ShardedLoader(
        source, dispatch=stage, copies=copies, activity=activity, on_batch=on_batch, seed_source=seed_source
    )


def _source_of(loader: Any, sharding: DataSharding, *, compare_samples: bool) -> BatchSource:
    """Return the source of a loader's batches, after checking that all ranks were given the same data."""
    is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if is_iterable:
        check_undivided_stream(loader.dataset, alone=sharding.shard.count == 1 and not sharding.for_all)
    if is_stock(loader):
        source = IterableSource(loader, sharding) if is_iterable else MapStyleSource(loader, sharding)
    else:
        for name in ("sampler", "batch_sampler"):
            check_undivided(getattr(loader, name, None))
        source = ExternalSource(loader, sharding)
    if (agreement := sharding.agreement) is not None:
        agreement.check_given(source.facts())
        if compare_samples and not source.reads_forwards:
            check_map_style(loader, agreement)
    return source


def _num_blocks(strategy: ShardingStrategy | IndexFunction, shard: Shard, num_nodes: int | None) -> int:
    if not callable(strategy) and strategy not in get_args(ShardingStrategy):
        raise ValueError(
            f"strategy={strategy!r}: must be one of {', '.join(get_args(ShardingStrategy))}, or a function of "
            "(position, shard) that returns an index"
        )
    if num_nodes is None:
        if strategy == "node" and shard.count > 1:
            raise ValueError(
                f"strategy='node': the number of nodes of the {shard.count} shards is unknown; pass num_nodes="
            )
        num_nodes = 1
    if strategy == "node" and (num_nodes < 1 or shard.count % num_nodes):
        raise ValueError(
            f"strategy='node': {shard.count} shards over num_nodes={num_nodes}: every node needs equally many"
        )
    return 1 if strategy == "interleaved" else num_nodes if strategy == "node" else shard.count


def _check(loader: Any, shard: Shard, even: UnevenPolicy, seed: int, copy_ahead: int) -> None:
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
            "again with every loop and has either a `dataset`, or state_dict and load_state_dict"
        )


def is_loader(obj: object) -> bool:
    """Return whether an object counts as a loader: an iterable with a `dataset`, or one that can save its state."""
    stateful = hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")
    return hasattr(obj, "__iter__") and (hasattr(obj, "dataset") or stateful)


def divides_itself(loader: Any) -> bool:
    """Return whether an unprepared loader's sampler or stream already gives each rank its own part of the data."""
    try:
        for name in ("sampler", "batch_sampler"):
            check_undivided(getattr(loader, name, None))
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            check_undivided_stream(loader.dataset, alone=False)
    except ValueError:
        return True
    return False
