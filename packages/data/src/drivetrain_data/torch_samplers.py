"""Which order stands for a sampler: torch's own are replaced by orders that any rank computes at any position."""

from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from drivetrain_data.blocks import BlockOrder, IndexFunction
from drivetrain_data.orders import (
    DrawnOrder,
    Order,
    ReplacementOrder,
    SequentialOrder,
    ShuffledOrder,
    SubsetOrder,
)
from drivetrain_data.samplers import PermutationSampler


def order_of(sampler: Any, *, seed: int, num_samples: int | None) -> Order:
    """The order that stands for a sampler: one of ours for torch's own, else what the sampler draws.

    Args:
        sampler: The user's, with a length.
        seed: What the order depends on, with the epoch.
        num_samples: The dataset's length; None if that is not known.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return SequentialOrder(len(sampler), seed=seed)
    if kind is RandomSampler:
        size = len(sampler.data_source)
        if sampler.replacement:
            return ReplacementOrder(size, seed=seed, num_positions=sampler.num_samples)
        return ShuffledOrder(size, seed=seed, num_positions=sampler.num_samples)
    if kind is SubsetRandomSampler:
        return SubsetOrder(sampler.indices, seed=seed)
    if kind is DistributedSampler:
        # It takes a part for one rank; what is sharded here is the whole that it was made for.
        size = len(sampler.dataset)
        return ShuffledOrder(size, seed=seed) if sampler.shuffle else SequentialOrder(size, seed=seed)
    if kind is PermutationSampler:
        return sampler.order(sampler.seed)
    return DrawnOrder(sampler, seed=seed, size=num_samples)


def block_order_of(
    sampler: Any, num_blocks: int, *, seed: int, strategy: str, function: IndexFunction | None = None
) -> BlockOrder:
    """The order that stands for a sampler where shards keep to blocks of the data: sequential or random in each.

    Raises:
        ValueError: The sampler gives something else than every sample once, or there are fewer samples than blocks.
    """
    kind = type(sampler)
    size, shuffled = len(sampler), kind is not SequentialSampler
    if kind is DistributedSampler:
        size, shuffled = len(sampler.dataset), sampler.shuffle
    plain = kind in (SequentialSampler, DistributedSampler) or (
        kind is PermutationSampler and sampler.block_size is None
    )
    if kind is RandomSampler:
        plain = not sampler.replacement and size == len(sampler.data_source)
    if not plain:
        raise ValueError(
            f"strategy={strategy!r}: blocks are read in sequence or shuffled, and {kind.__name__} asks for another "
            "order; use shuffle=True or no sampler, or strategy='interleaved'"
        )
    if size < num_blocks:
        raise ValueError(
            f"strategy={strategy!r}: {size} samples are fewer than {num_blocks} blocks; use strategy='interleaved'"
        )
    return BlockOrder(size, num_blocks, seed=seed, shuffled=shuffled, function=function)
