"""Replace known samplers by equivalent orders that any rank can compute at any position."""

from typing import Any, cast

import numpy as np
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from drivetrain_data.sampling.block_shuffle import BlockOrder
from drivetrain_data.sampling.indices import as_indices, outside_of
from drivetrain_data.sampling.order import (
    ComputedOrder,
    ReplacementOrder,
    SequentialOrder,
    ShuffledOrder,
    SubsetOrder,
)
from drivetrain_data.sampling.sampler_order import DrawnOrder, IndexOrder
from drivetrain_data.sampling.samplers import PermutationSampler
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.state.sampler_parts import parts_of

# By name, because torchdata, whose sampler has the fields of torch's, need not be installed.
_OF_TORCHDATA = "torchdata.stateful_dataloader.sampler.RandomSampler"


def order_of(sampler: Any, sharding: DataSharding, num_samples: int | None) -> IndexOrder:
    """Return the order that replaces a sampler with a length: computed for known samplers, else drawn from it."""
    order = _compute_order(sampler, sharding.seed)
    if order is None:
        check_undivided(sampler)
        return DrawnOrder(sampler, seed=sharding.seed, size=num_samples, agreement=sharding.agreement)
    if num_samples is not None and (outside := order.first_outside(num_samples)) is not None:
        raise outside_of(outside, num_samples, sampler)
    return order


def block_order_of(sampler: Any, sharding: DataSharding, num_samples: int | None) -> BlockOrder:
    """Return the order that replaces a sampler if each shard reads its own block, in sequence or shuffled."""
    order = order_of(sampler, sharding, num_samples)
    if isinstance(order, SequentialOrder):
        shuffled = False
    elif type(order) is ShuffledOrder and order.num_positions == order.size:
        shuffled = True
    else:
        raise ValueError(
            f"strategy={sharding.strategy_name}: blocks are read in sequence or shuffled, and "
            f"{type(sampler).__name__} asks for another order; use shuffle=True or no sampler, or "
            "strategy='interleaved'"
        )
    if order.size < sharding.num_blocks:
        raise ValueError(
            f"strategy={sharding.strategy_name}: {order.size} samples are fewer than {sharding.num_blocks} blocks; "
            "use strategy='interleaved'"
        )
    return BlockOrder(
        order.size,
        sharding.num_blocks,
        seed=sharding.seed,
        shuffled=shuffled,
        function=sharding.strategy if callable(sharding.strategy) else None,
        warns=sharding.shard.index == 0,
    )


def _compute_order(sampler: Any, seed: int) -> ComputedOrder | None:
    """Return the order of a known sampler; None for an unknown sampler and for a subset by keys."""
    kind: Any = type(sampler)
    if is_torchs_distributed(sampler):
        # The sampler selects one rank's part; the whole dataset behind it is sharded here instead.
        return (ShuffledOrder if sampler.shuffle else SequentialOrder)(len(sampler.dataset), seed=seed)
    if kind is SequentialSampler:
        return SequentialOrder(len(sampler), seed=seed)
    if kind is SubsetRandomSampler:
        indices = as_indices(list(sampler.indices), None, sampler)
        return SubsetOrder(indices, seed=seed) if isinstance(indices, np.ndarray) else None
    if kind is PermutationSampler:
        if sampler.epoch:
            raise ValueError(
                f"PermutationSampler with epoch={sampler.epoch}: a sharded loader counts epochs itself, from 0; "
                f"leave it out, and call set_epoch({sampler.epoch}) of the sharded loader"
            )
        return sampler.order(sampler.seed)
    if kind is not RandomSampler and f"{kind.__module__}.{kind.__qualname__}" != _OF_TORCHDATA:
        return None
    size, num_positions = len(sampler.data_source), sampler.num_samples
    if size == 0 and num_positions > 0:
        raise ValueError(
            f"{kind.__name__} has num_samples={num_positions} to draw from a dataset of 0 samples, which torch "
            "refuses at the first batch; give it samples, or leave the loader out"
        )
    order = ReplacementOrder if sampler.replacement else ShuffledOrder
    return order(size, seed=seed, num_positions=num_positions)


def is_torchs_distributed(sampler: Any) -> bool:
    """Return whether a sampler behaves as torch's DistributedSampler. The undivided order is then known."""
    if not isinstance(sampler, DistributedSampler):
        return False
    kind = type(cast("Any", sampler))
    if kind.__module__.startswith("torchdata.stateful_dataloader"):
        return True
    return all(
        getattr(kind, name) is getattr(DistributedSampler, name)
        for name in ("__init__", "__iter__", "__len__", "set_epoch")
    )


def check_undivided(reader: Any) -> None:
    """Raise ValueError if a sampler, or a sampler that it holds, divides the data among ranks itself."""
    for part in parts_of(reader):
        count = getattr(part, "num_replicas", None)
        if isinstance(count, int) and count > 1:
            where = "" if part is reader else f" inside {type(reader).__name__}"
            raise ValueError(
                f"{type(part).__name__}{where} divides the data itself, among num_replicas={count}, and would be "
                "divided again: most samples would be lost; pass the undivided one, such as shuffle=True or a "
                "RandomSampler"
            )
