"""Find the random generators that a user's sampler holds at any depth, and seed them for an epoch."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from drivetrain_data.randomness.permutation import hash_key
from drivetrain_data.state.sampler_objects import parts_of

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def own_generators(sampler: object) -> Iterator[Any]:
    """Yield every generator that a sampler holds at any depth, except the global ones."""
    numpy_random: Any = np.random  # its global generator has no public name
    shared = (torch.default_generator, numpy_random.mtrand._rand)
    for part in parts_of(sampler):
        if isinstance(part, _GENERATORS) and not any(part is one for one in shared):
            yield part


def seed_own_generators(sampler: object, *key: int) -> None:
    """Seed every generator that a sampler holds at any depth, except the global ones, from the key and its number."""
    for number, part in enumerate(own_generators(sampler)):
        seed = hash_key(*key, number) if number else hash_key(*key)
        if isinstance(part, torch.Generator):
            part.manual_seed(seed)
        elif isinstance(part, np.random.Generator):
            part.bit_generator.state = type(part.bit_generator)(seed).state
        elif isinstance(part, np.random.RandomState):
            part.seed(seed % 2**32)
        else:
            part.seed(seed)
