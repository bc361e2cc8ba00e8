"""The kinds of random generators that a user may hand over: how each is seeded, and how a seed is drawn from it."""

import random
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator with an integer below 2**64."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bit_generator: Any = generator.bit_generator
        bit_generator.state = type(bit_generator)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.seed(seed)


def draw_seed(generator: Any) -> int:
    """Draw a seed, 0 to 2**63 - 1, from a generator; the first draw from a freshly seeded torch one is its seed."""
    if isinstance(generator, torch.Generator):
        seed = generator.initial_seed()
        fresh = torch.Generator(device=generator.device).manual_seed(seed)
        undrawn = torch.equal(fresh.get_state(), generator.get_state())
        number = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
        return (seed if undrawn else int(number.item())) % 2**63
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(2**63))
    if isinstance(generator, np.random.RandomState):
        return int(generator.randint(2**63 - 1, dtype=np.int64))
    return generator.getrandbits(63)
