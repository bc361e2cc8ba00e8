"""Which order stands for a sampler: torch's own are replaced by orders that any rank computes at any position."""

from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

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
        return ShuffledOrder(sampler.num_samples, seed=sampler.seed)
    return DrawnOrder(sampler, seed=seed, size=num_samples)
