"""The seed that a loader brings along: drawn from the generators that its user gave to it or to its sampler."""

import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.sampling.samplers import PermutationSampler
from drivetrain_data.sampling.torch_samplers import is_torchs_distributed
from drivetrain_data.state.sampler_generators import own_generators

_SEED_BITS = 63


def own_seed(loader: Any) -> int | None:
    """Draw a seed from the generators of a loader and its sampler, as torch's own loader would draw from them.

    The first draw from a `torch.Generator` that was just seeded is that seed. Any later one, for a second loader that
    shares the generator or after other draws, is the generator's next number. The seeds of torch's
    `DistributedSampler` and of `PermutationSampler` are taken as they are.

    Args:
        loader: A DataLoader, or an iterable of batches; its `batch_sampler`, `sampler` and `generator` are looked at.

    Returns:
        0 to 2**63 - 1; None where it has no generator of its own. Ranks that seed their generators differently draw
        different ones: take one rank's for all.
    """
    reader = _reader(loader)
    fixed = _fixed_seed(reader)
    if fixed is not None:
        return fixed
    generators = list(_generators(reader, loader))
    if not generators:
        return None
    drawn = [_draw(generator) for generator in generators]
    return drawn[0] if len(drawn) == 1 else hash_key(*drawn) >> 1


def seed_at(seed: int, place: int) -> int:
    """A loader's seed by its place among those that share one: the seed itself for the first, others hashed from it.

    Two loaders over one dataset, read side by side, are then not in the same order.

    Args:
        seed: What they share, 0 to 2**63 - 1.
        place: 0, 1, 2... in the order they were prepared.
    """
    return seed if place == 0 else hash_key(seed, place) >> 1


def _reader(loader: Any) -> Any:
    """What decides the order: the user's batch sampler, or the sampler."""
    if isinstance(loader, DataLoader):
        chosen = cast("Any", loader)
        return chosen.sampler if chosen.batch_size is not None else chosen.batch_sampler or chosen.sampler
    return getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)


def _fixed_seed(reader: Any) -> int | None:
    """The seed of a sampler that has one instead of a generator; torch's 0 is the default, and says nothing."""
    if type(reader) is PermutationSampler:
        return reader.seed
    if isinstance(reader, DistributedSampler) and is_torchs_distributed(reader):
        return (reader.seed % 2**_SEED_BITS) or None
    return None


def _generators(reader: Any, loader: Any) -> Iterator[Any]:
    """Those of what decides the order; else the loader's, which then seeds its workers alone."""
    found = list(own_generators(reader)) if reader is not None else []
    own = getattr(loader, "generator", None)
    if not found and isinstance(own, torch.Generator) and own is not torch.default_generator:
        found = [own]
    return iter(found)


def _draw(generator: Any) -> int:
    if isinstance(generator, torch.Generator):
        return _draw_from_torch(generator)
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(2**_SEED_BITS))
    if isinstance(generator, np.random.RandomState):
        return int(generator.randint(2**_SEED_BITS - 1, dtype=np.int64))
    assert isinstance(generator, random.Random)
    return generator.getrandbits(_SEED_BITS)


def _draw_from_torch(generator: torch.Generator) -> int:
    seed = generator.initial_seed()
    fresh = torch.Generator(device=generator.device).manual_seed(seed)
    undrawn = torch.equal(fresh.get_state(), generator.get_state())
    drawn = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator).item()
    return (seed if undrawn else int(drawn)) % 2**_SEED_BITS
