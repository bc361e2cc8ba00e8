"""Choose the sampler of a shard's steps, which replaces a loader's own samplers."""

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from drivetrain_data.sampling.known_samplers import block_order_of, check_undivided, order_of
from drivetrain_data.sampling.partition import num_steps
from drivetrain_data.sampling.sampler_order import DrawnBatches, IndexOrder
from drivetrain_data.sampling.samplers import ItemSampler, OrderSampler, StepSampler
from drivetrain_data.sampling.sharding import DataSharding
from drivetrain_data.sampling.whole_batches import WholeBatchSampler
from drivetrain_data.state.sampler_parts import length_of

logger = logging.getLogger(__name__)


def step_sampler_of(loader: DataLoader[Any], sharding: DataSharding) -> StepSampler:
    """Return the sampler of a shard's steps for a loader of a map-style dataset; ValueError if they do not fit."""
    sampler: Any = loader.sampler
    size = loader.batch_size
    batches: Any = None if size is not None else loader.batch_sampler
    if type(batches) is BatchSampler:  # equivalent to its sampler and a batch size
        if batches.drop_last:
            sharding = replace(sharding, even="drop")
        sampler, size, batches = batches.sampler, batches.batch_size, None
    if batches is None and length_of(sampler) is None:
        if size is None:
            raise ValueError(
                f"batch_size=None with {type(sampler).__name__}, which has no length; give it __len__"
            )
        batches = BatchSampler(sampler, size, drop_last=sharding.even == "drop")
    num_samples = length_of(loader.dataset)
    if batches is not None:
        name = type(batches).__name__
        sharding.check_interleaved(f"the batches of {name} are distributed whole")
        check_undivided(batches)
        if sharding.split and sharding.even == "pad":
            raise ValueError(
                f"even='pad' with split_batches=True: batches of {name} have sizes of their own, and are split as "
                "they are; use even='uneven', or a batch_size instead of the batch sampler"
            )
        order = DrawnBatches(batches, seed=sharding.seed, size=num_samples, agreement=sharding.agreement)
        chosen: StepSampler = WholeBatchSampler(order, sharding)
        few = "batches are fewer than one"
    elif size is None:
        sharding.check_unsplit("with batch_size=None there are no batches to split")
        chosen = ItemSampler(_order(sampler, sharding, num_samples), sharding)
        few = "samples are fewer than one batch of 1"
    else:
        size = sharding.size_on_each(size)
        chosen = OrderSampler(_order(sampler, sharding, num_samples), size, sharding)
        few = f"samples are fewer than one batch of {size}"
    _warn_if_empty(chosen, few)
    return chosen


def _order(sampler: Any, sharding: DataSharding, num_samples: int | None) -> IndexOrder:
    if sharding.strategy == "interleaved":
        return order_of(sampler, sharding, num_samples)
    if sharding.for_all:
        sharding.check_interleaved("one rank reads for all, and none has data of its own")
    return block_order_of(sampler, sharding, num_samples)


def _warn_if_empty(sampler: StepSampler, few: str) -> None:
    """Warn on the first shard if epochs have no steps; torch's loader with `drop_last` is then empty too."""
    shard, even = sampler.sharding.shard, sampler.sharding.even
    if even != "drop":
        return
    with suppress(TypeError):  # a batch sampler without a length
        length = sampler.order.length(0)
        if length and not num_steps(length, sampler.stride, even) and shard.index == 0:
            logger.warning(
                "%d %s on each of %d shards, and the tail is dropped: every epoch of this loader is empty; use a "
                'smaller batch, or even="uneven" without drop_last',
                length,
                few,
                shard.count,
            )
