"""Replace torch's own samplers by equivalent orders that any rank can compute at any position."""

from typing import Any, cast

import numpy as np
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from drivetrain_data.randomness.permutation import Positions
from drivetrain_data.sampling.block_shuffle import BlockOrder, IndexFunction
from drivetrain_data.sampling.indices import as_indices, outside_of
from drivetrain_data.sampling.order import (
    Order,
    ReplacementOrder,
    SequentialOrder,
    ShuffledOrder,
    SubsetOrder,
)
from drivetrain_data.sampling.sampler_order import DrawnOrder
from drivetrain_data.sampling.samplers import PermutationSampler
from drivetrain_data.state.sampler_objects import parts_of


def order_of(sampler: Any, *, seed: int, num_samples: int | None) -> Order:
    """Return the order that replaces a sampler: a computed order for torch's samplers, else what the sampler draws.

    Args:
        sampler: The user's sampler, with a length.
        seed: The seed from which, with the epoch, the order is derived.
        num_samples: The length of the dataset; None if unknown.

    Raises:
        ValueError: The sampler divides the data itself, its epoch would be ignored, or it draws from no samples.
        IndexRangeError: The sampler returns indices that are not in the dataset.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        size = len(sampler)
        order: Order = SequentialOrder(size, seed=seed)
    elif _is_random(kind):
        size = len(sampler.data_source)
        if size == 0 and sampler.num_samples > 0:
            raise ValueError(
                f"{kind.__name__} has num_samples={sampler.num_samples} to draw from a dataset of 0 samples, which "
                "torch refuses at the first batch; give it samples, or leave the loader out"
            )
        make = ReplacementOrder if sampler.replacement else ShuffledOrder
        order = make(size, seed=seed, num_positions=sampler.num_samples)
    elif kind is SubsetRandomSampler:
        indices = as_indices(list(sampler.indices), None, sampler)
        if not isinstance(indices, np.ndarray):
            return DrawnOrder(sampler, seed=seed, size=num_samples)
        _check_subset(indices, num_samples, sampler)
        return SubsetOrder(indices, seed=seed)
    elif is_torchs_distributed(sampler):
        # The sampler selects one rank's part; the whole dataset behind it is sharded here instead.
        size = len(sampler.dataset)
        order = ShuffledOrder(size, seed=seed) if sampler.shuffle else SequentialOrder(size, seed=seed)
    elif kind is PermutationSampler:
        _check_epoch(sampler)
        size, order = sampler.num_samples, sampler.order(sampler.seed)
    else:
        check_undivided(sampler)
        return DrawnOrder(sampler, seed=seed, size=num_samples)
    _check_size(size, num_samples, sampler)
    return order


def block_order_of(
    sampler: Any,
    num_blocks: int,
    *,
    seed: int,
    num_samples: int | None,
    strategy: str,
    function: IndexFunction | None = None,
    tells: bool = True,
) -> BlockOrder:
    """Return the order that replaces a sampler if shards keep to blocks, each read in sequence or shuffled.

    Args:
        sampler: The user's sampler, with a length.
        num_blocks: The number of blocks.
        seed: The seed from which, with the epoch, the order is derived.
        num_samples: The length of the dataset; None if unknown.
        strategy: The name of the strategy, for errors.
        function: The user's function that assigns samples to shards; None for contiguous blocks.
        tells: Whether to warn if a resume makes shards leave their blocks.

    Raises:
        ValueError: The sampler does not return every sample once, or there are fewer samples than blocks.
        IndexRangeError: The sampler returns indices that are not in the dataset.
    """
    kind = type(sampler)
    size, shuffled = len(sampler), kind is not SequentialSampler
    distributed = is_torchs_distributed(sampler)
    if distributed:
        size, shuffled = len(sampler.dataset), sampler.shuffle
    plain = distributed or kind is SequentialSampler
    if kind is PermutationSampler:
        _check_epoch(sampler)
        plain = sampler.block_size is None
    if _is_random(kind):
        plain = not sampler.replacement and size == len(sampler.data_source)
    if not plain:
        check_undivided(sampler)
        raise ValueError(
            f"strategy={strategy}: blocks are read in sequence or shuffled, and {kind.__name__} asks for another "
            "order; use shuffle=True or no sampler, or strategy='interleaved'"
        )
    _check_size(size, num_samples, sampler)
    if size < num_blocks:
        raise ValueError(
            f"strategy={strategy}: {size} samples are fewer than {num_blocks} blocks; use strategy='interleaved'"
        )
    return BlockOrder(size, num_blocks, seed=seed, shuffled=shuffled, function=function, tells=tells)


def _is_random(kind: type) -> bool:
    """Return whether a class is torch's RandomSampler, or torchdata's, which has the same fields."""
    return kind is RandomSampler or (kind.__module__, kind.__name__) == (
        "torchdata.stateful_dataloader.sampler",
        "RandomSampler",
    )


def is_torchs_distributed(sampler: Any) -> bool:
    """Return whether a sampler behaves as torch's DistributedSampler, so that the undivided order is known."""
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
    """Check that a sampler does not divide the data among ranks itself.

    Args:
        reader: The user's sampler or batch sampler.

    Raises:
        ValueError: The sampler, or a sampler inside it, divides the data.
    """
    for part in parts_of(reader):
        count = getattr(part, "num_replicas", None)
        if isinstance(count, int) and count > 1:
            where = "" if part is reader else f" inside {type(reader).__name__}"
            raise ValueError(
                f"{type(part).__name__}{where} divides the data itself, among num_replicas={count}, and would be "
                "divided again: most samples would be lost; pass the undivided one, such as shuffle=True or a "
                "RandomSampler"
            )


def _check_subset(indices: Positions, num_samples: int | None, sampler: object) -> None:
    # Negative indices are refused: they are a mistake, or name a sample that is already in the subset.
    if num_samples is None:
        return
    outside = np.flatnonzero((indices < 0) | (indices >= num_samples))
    if outside.size:
        raise outside_of(int(indices[outside[0]]), num_samples, sampler)


def _check_size(size: int, num_samples: int | None, sampler: object) -> None:
    if num_samples is not None and size > num_samples:
        raise outside_of(size - 1, num_samples, sampler)


def _check_epoch(sampler: PermutationSampler) -> None:
    if sampler.epoch:
        raise ValueError(
            f"PermutationSampler with epoch={sampler.epoch}: a sharded loader counts epochs itself, from 0; leave it "
            f"out, and call set_epoch({sampler.epoch}) of the sharded loader"
        )
