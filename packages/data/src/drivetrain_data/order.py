"""The global order of an epoch: which sample stands at which position, the same on every rank."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import RandomSampler, SequentialSampler

from drivetrain_data.errors import DataError
from drivetrain_data.permutation import Permutation


class Order(Protocol):
    """One epoch's order."""

    length: int

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at positions in [0, length)."""
        ...


class Sequential:
    """The dataset's own order."""

    def __init__(self, length: int) -> None:
        self.length = length

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at positions."""
        return positions


class Drawn:
    """The order that a sampler drew."""

    def __init__(self, samples: NDArray[np.int64]) -> None:
        self.length = len(samples)
        self._samples = samples

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at positions."""
        return self._samples[positions]


class OrderSource:
    """Makes the order of any epoch from the sampler a loader came with.

    Args:
        sampler: The loader's sampler.
        length: The number of samples in the dataset.
        seed: The seed of the run.

    Attributes:
        description: Where the order comes from, for the effective plan.
    """

    def __init__(self, sampler: Iterable[Any], *, length: int, seed: int) -> None:
        self._sampler = sampler
        self._dataset_length = length
        self._seed = seed
        self._is_shuffled = (
            type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == length
        )
        self._is_sequential = type(sampler) is SequentialSampler
        if self._is_shuffled:
            self.description = f"shuffled, a function of seed {seed} and the epoch"
        elif self._is_sequential:
            self.description = "the dataset's own"
        else:
            self.description = (
                f"drawn from {type(sampler).__name__} under seed {seed} and the epoch, on every rank"
            )

    @property
    def length(self) -> int | None:
        """Positions in an epoch, where known without drawing."""
        try:
            return len(self._sampler)  # pyright: ignore[reportArgumentType]
        except TypeError:
            return None

    def epoch(self, epoch: int) -> Order:
        """The order of an epoch.

        Raises:
            DataError: The sampler yields an index outside the dataset.
        """
        if self._is_sequential:
            return Sequential(self._dataset_length)
        if self._is_shuffled:
            return Permutation(self._dataset_length, seed=self._seed, epoch=epoch)
        return Drawn(self._draw(epoch))

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        samples = np.fromiter(drawn(self._sampler, self._seed, epoch), dtype=np.int64)
        outside = (samples < -self._dataset_length) | (samples >= self._dataset_length)
        if outside.any():
            position = int(outside.argmax())
            raise DataError(
                f"{type(self._sampler).__name__} yields {samples[position]} at position {position}: the dataset has "
                f"{self._dataset_length} samples, 0 to {self._dataset_length - 1}"
            )
        return samples


def drawn(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """Everything a sampler yields in an epoch, drawn under generators seeded alike on every rank.

    Args:
        sampler: Any sampler or batch sampler; its `set_epoch` is called if it has one, its own generator is seeded.
        seed: The seed of the run.
        epoch: The epoch.
    """
    key = epoch_seed(seed, epoch)
    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
        set_epoch(epoch)
    inner = getattr(sampler, "sampler", None)
    with _seeded(key):
        for one in (sampler, inner):
            generator = getattr(one, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(key)
        return list(sampler)


def epoch_seed(seed: int, epoch: int, index: int = 0) -> int:
    """A seed of its own for an epoch (and a shard): a 63-bit hash of all three."""
    state = np.random.SeedSequence([seed, epoch, index]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


@contextmanager
def _seeded(key: int) -> Iterator[None]:
    """The global generators, seeded for the block and put back after it: samplers draw from any of them."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
