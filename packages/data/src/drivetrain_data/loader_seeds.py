"""Draw a loader's seed from the generators that the user gave to the loader or its sampler."""

from typing import Any, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler

from drivetrain_data.randomness.generators import draw_seed
from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.sampling.known_samplers import is_torchs_distributed
from drivetrain_data.sampling.samplers import PermutationSampler
from drivetrain_data.state.sampler_parts import own_generators


def own_seed(loader: Any) -> int | None:
    """Draw a seed, 0 to 2**63 - 1, from the generators of a loader and its sampler, as torch's loader does.

    The first draw from a freshly seeded `torch.Generator` is its seed. Later draws, such as those for a second loader
    with the same generator, are the generator's next numbers. The seeds of torch's `DistributedSampler` and
    of `PermutationSampler` are used unchanged. Ranks with differently seeded generators draw different seeds: use the
    seed of one rank on all ranks. Return None if the loader, a DataLoader or an iterable of batches, has no generator
    of its own in `batch_sampler`, `sampler` or `generator`.
    """
    reader: Any = getattr(loader, "sampler", None)  # the object that determines the order
    batches = getattr(loader, "batch_sampler", None)
    # The batch sampler of a DataLoader with a batch size is torch's own, over the sampler.
    if batches is not None and not (
        isinstance(loader, DataLoader) and cast("Any", loader).batch_size is not None
    ):
        reader = batches
    if type(reader) is PermutationSampler:
        return reader.seed
    if isinstance(reader, DistributedSampler) and is_torchs_distributed(reader) and reader.seed % 2**63:
        return reader.seed % 2**63  # torch's default of 0 counts as none
    generators = list(own_generators(reader)) if reader is not None else []
    own = getattr(loader, "generator", None)  # which seeds the workers alone where the sampler has generators
    if not generators and isinstance(own, torch.Generator) and own is not torch.default_generator:
        generators = [own]
    if not generators:
        return None
    drawn = [draw_seed(generator) for generator in generators]
    return drawn[0] if len(drawn) == 1 else hash_key(*drawn) >> 1


def seed_at(seed: int, place: int) -> int:
    """Derive a loader's seed from a shared seed and its place, counted from 0, in the order of preparing.

    The first loader gets the seed itself, later loaders get hashes of the seed. Two loaders over one dataset thus
    have different orders.

    Example:
        >>> seed_at(7, 1) == seed_at(7, 1) != seed_at(7, 2)
        True
    """
    return seed if place == 0 else hash_key(seed, place) >> 1
