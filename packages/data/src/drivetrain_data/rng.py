"""Random draws that depend on a key alone: not on what the program drew before, and not felt by it afterwards."""

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from drivetrain_data.permutation import hash_key
from drivetrain_data.sampler_parts import parts_of


class _States(NamedTuple):
    torch: torch.Tensor
    numpy: Any  # the bit generator itself: exchanging it takes 1 us, copying its state 30
    python: Any


class KeyedDraws:
    """The global CPU generators of torch, NumPy and Python, seeded from a key, for as long as a block lasts.

    The next block goes on where the last one stopped; outside, the generators are as if nothing had been drawn.

    Args:
        key: Any non-negative integers, such as (seed, epoch).
    """

    def __init__(self, *key: int) -> None:
        self._seed = hash_key(*key)
        self._states: _States | None = None

    @contextmanager
    def active(self) -> Generator[None]:
        """Draw from the keyed generators inside."""
        outside = _capture()
        if self._states is None:
            torch.default_generator.manual_seed(self._seed)
            np.random.set_bit_generator(np.random.MT19937(self._seed))  # pyright: ignore[reportAttributeAccessIssue] numpy types it not
            random.seed(self._seed)
        else:
            _restore(self._states)
        try:
            yield
        finally:
            self._states = _capture()
            _restore(outside)


def plain_states() -> dict[str, Any]:
    """The states of the global CPU generators of torch, NumPy and Python, as plain values, arrays and tensors."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def load_plain_states(states: Mapping[str, Any]) -> None:
    """Take up what `plain_states` gave."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])


def seed_own_generators(sampler: object, *key: int) -> None:
    """Seed every generator that a sampler holds, at any depth, each by its own number; the global ones are left."""
    numpy_random: Any = np.random  # whose global generator has no public name
    shared = (torch.default_generator, numpy_random.mtrand._rand)
    number = 0
    for part in parts_of(sampler):
        if any(part is one for one in shared):
            continue
        seed = hash_key(*key, number) if number else hash_key(*key)
        if isinstance(part, torch.Generator):
            part.manual_seed(seed)
        elif isinstance(part, np.random.Generator):
            part.bit_generator.state = type(part.bit_generator)(seed).state
        elif isinstance(part, np.random.RandomState):
            part.seed(seed % 2**32)
        elif isinstance(part, random.Random):
            part.seed(seed)
        else:
            continue
        number += 1


def _capture() -> _States:
    bit_generator: Any = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    return _States(torch.get_rng_state(), bit_generator, random.getstate())


def _restore(states: _States) -> None:
    torch.set_rng_state(states.torch)
    np.random.set_bit_generator(states.numpy)  # pyright: ignore[reportAttributeAccessIssue]
    random.setstate(states.python)
