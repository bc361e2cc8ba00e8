"""The kinds of random generators that a user may hand over: how each is seeded, and how a seed is drawn from it."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

_SEED_BITS = 63


class GeneratorKind(NamedTuple):
    """A kind of random generator.

    Attributes:
        seed: A function that seeds a generator with an integer below 2**64.
        draw: A function that draws a seed, 0 to 2**63 - 1, from a generator.
    """

    seed: Callable[[Any, int], object]
    draw: Callable[[Any], int]


def _seed_numpy(generator: np.random.Generator, seed: int) -> None:
    bit_generator: Any = generator.bit_generator
    bit_generator.state = type(bit_generator)(seed).state


def _draw_from_torch(generator: torch.Generator) -> int:
    seed = generator.initial_seed()
    fresh = torch.Generator(device=generator.device).manual_seed(seed)
    undrawn = torch.equal(fresh.get_state(), generator.get_state())
    drawn = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator).item()
    return (seed if undrawn else int(drawn)) % 2**_SEED_BITS


_KINDS: dict[type, GeneratorKind] = {
    torch.Generator: GeneratorKind(lambda it, seed: it.manual_seed(seed), _draw_from_torch),
    np.random.Generator: GeneratorKind(_seed_numpy, lambda it: int(it.integers(2**_SEED_BITS))),
    np.random.RandomState: GeneratorKind(
        lambda it, seed: it.seed(seed % 2**32), lambda it: int(it.randint(2**_SEED_BITS - 1, dtype=np.int64))
    ),
    random.Random: GeneratorKind(lambda it, seed: it.seed(seed), lambda it: it.getrandbits(_SEED_BITS)),
}
GENERATORS = tuple(_KINDS)


def kind_of(generator: Any) -> GeneratorKind:
    """Return the kind of a generator, one of `GENERATORS`."""
    return next(kind for type_, kind in _KINDS.items() if isinstance(generator, type_))
