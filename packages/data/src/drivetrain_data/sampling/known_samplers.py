"""Replace known samplers by equivalent orders that any rank can compute at any position."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from drivetrain_data.randomness.permutation import Positions
from drivetrain_data.sampling.block_shuffle import BlockOrder
from drivetrain_data.sampling.drawn_order import DrawnOrder
from drivetrain_data.sampling.indices import as_indices, outside_of
from drivetrain_data.sampling.order import (
    ReplacementOrder,
    SampleOrder,
    SequentialOrder,
    ShuffledOrder,
    SubsetOrder,
)
from drivetrain_data.sampling.samplers import PermutationSampler
from drivetrain_data.sampling.sharding import Sharding
from drivetrain_data.state.sampler_parts import parts_of


class KnownSampler(NamedTuple):
    """What is known of a sampler whose order this package computes itself.

    Attributes:
        size: The number of samples that the dataset must have.
        order: The function that returns the order for a seed.
        shuffled: Whether every sample comes once, shuffled (True) or in sequence (False); None for other orders.
        indices: The indices that the sampler chooses from; None for all up to `size`.
        epoch: The epoch that the sampler was built to begin with.
    """

    size: int
    order: Callable[..., SampleOrder]
    shuffled: bool | None
    indices: Positions | None = None
    epoch: int = 0


def order_of(sampler: Any, sharding: Sharding, num_samples: int | None) -> SampleOrder:
    """Return the order that replaces a sampler: a computed order for known samplers, else what the sampler draws.

    Args:
        sampler: The user's sampler, with a length.
        sharding: The division of the order, with the seed from which, with the epoch, the order is derived.
        num_samples: The length of the dataset; None if unknown.

    Raises:
        ValueError: The sampler divides the data itself, its epoch would be ignored, or it draws from no samples.
        IndexRangeError: The sampler returns indices that are not in the dataset.
    """
    known = _known(sampler)
    if known is None:
        check_undivided(sampler)
        return DrawnOrder(sampler, seed=sharding.seed, size=num_samples, agree=sharding.agree)
    _check(known, sampler, num_samples)
    return known.order(seed=sharding.seed)


def block_order_of(sampler: Any, sharding: Sharding, num_samples: int | None) -> BlockOrder:
    """Return the order that replaces a sampler if shards keep to blocks, each read in sequence or shuffled.

    Args:
        sampler: The user's sampler, with a length.
        sharding: The division of the order, with its blocks or the user's function that assigns samples to shards.
        num_samples: The length of the dataset; None if unknown.

    Raises:
        ValueError: The sampler does not return every sample once, or there are fewer samples than blocks.
        IndexRangeError: The sampler returns indices that are not in the dataset.
    """
    known = _known(sampler)
    if known is None or known.shuffled is None:
        check_undivided(sampler)
        raise ValueError(
            f"strategy={sharding.strategy_name}: blocks are read in sequence or shuffled, and "
            f"{type(sampler).__name__} asks for another order; use shuffle=True or no sampler, or "
            "strategy='interleaved'"
        )
    _check(known, sampler, num_samples)
    if known.size < sharding.num_blocks:
        raise ValueError(
            f"strategy={sharding.strategy_name}: {known.size} samples are fewer than {sharding.num_blocks} blocks; "
            "use strategy='interleaved'"
        )
    return BlockOrder(
        known.size,
        sharding.num_blocks,
        seed=sharding.seed,
        shuffled=known.shuffled,
        function=sharding.strategy if callable(sharding.strategy) else None,
        tells=sharding.shard.index == 0,
    )


def _known(sampler: Any) -> KnownSampler | None:
    if is_torchs_distributed(sampler):
        return _distributed(sampler)
    describe = _KNOWN.get(_name(type(sampler)))
    return None if describe is None else describe(sampler)


def _sequential(sampler: SequentialSampler) -> KnownSampler:
    return KnownSampler(len(sampler), partial(SequentialOrder, len(sampler)), shuffled=False)


def _random(sampler: RandomSampler) -> KnownSampler:
    size, num_positions = len(sampler.data_source), sampler.num_samples
    if size == 0 and num_positions > 0:
        raise ValueError(
            f"{type(sampler).__name__} has num_samples={num_positions} to draw from a dataset of 0 samples, which "
            "torch refuses at the first batch; give it samples, or leave the loader out"
        )
    order = partial(
        ReplacementOrder if sampler.replacement else ShuffledOrder, size, num_positions=num_positions
    )
    is_once = not sampler.replacement and num_positions == size
    return KnownSampler(size, order, shuffled=True if is_once else None)


def _subset(sampler: SubsetRandomSampler) -> KnownSampler | None:
    indices = as_indices(list(sampler.indices), None, sampler)
    if not isinstance(indices, np.ndarray):
        return None  # keys, not indices
    return KnownSampler(len(indices), partial(SubsetOrder, indices), shuffled=None, indices=indices)


def _distributed(sampler: "DistributedSampler[Any]") -> KnownSampler:
    # The sampler selects one rank's part; the whole dataset behind it is sharded here instead.
    dataset: Any = sampler.dataset
    order = ShuffledOrder if sampler.shuffle else SequentialOrder
    return KnownSampler(len(dataset), partial(order, len(dataset)), shuffled=sampler.shuffle)


def _permutation(sampler: PermutationSampler) -> KnownSampler:
    shuffled = True if sampler.block_size is None else None
    return KnownSampler(sampler.num_samples, sampler.order, shuffled, epoch=sampler.epoch)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# By name, because torchdata, whose samplers have the fields of torch's, need not be installed.
_KNOWN: dict[str, Callable[[Any], KnownSampler | None]] = {
    _name(SequentialSampler): _sequential,
    _name(RandomSampler): _random,
    "torchdata.stateful_dataloader.sampler.RandomSampler": _random,
    _name(SubsetRandomSampler): _subset,
    _name(PermutationSampler): _permutation,
}


def _check(known: KnownSampler, sampler: object, num_samples: int | None) -> None:
    """Check that a sampler begins at epoch 0 and that its indices are in the dataset."""
    if known.epoch:
        raise ValueError(
            f"PermutationSampler with epoch={known.epoch}: a sharded loader counts epochs itself, from 0; leave it "
            f"out, and call set_epoch({known.epoch}) of the sharded loader"
        )
    if num_samples is None:
        return
    if known.indices is None:
        if known.size > num_samples:
            raise outside_of(known.size - 1, num_samples, sampler)
        return
    # Negative indices are refused: they are a mistake, or name a sample that is already in the subset.
    outside = known.indices[(known.indices < 0) | (known.indices >= num_samples)]
    if outside.size:
        raise outside_of(int(outside[0]), num_samples, sampler)


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
