"""The order of an epoch: the sample at each position, the same on every rank.

A computed order depends only on the epoch and its constructor's values. It is independent of ranks, workers
and batch sizes, so any of these may change in the middle of an epoch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from drivetrain_data.randomness.permutation import ORDER_VERSION, Permutation, Positions, hash_key, hash_words
from drivetrain_data.sampling.indices import checksum_of


class Order(ABC):
    """A base class of orders, which derive the samples or batches of every epoch from a seed and the epoch.

    Saved positions contain the name, which includes a version. Loading a state sets the saved seed.
    """

    def __init__(self, name: str, *, seed: int) -> None:
        self.name = name
        self.seed = seed

    @property
    @abstractmethod
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""

    @abstractmethod
    def length(self, epoch: int, /) -> int:
        """Return the number of positions in an epoch."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the values, besides the name, that must match those of a saved position."""

    def begin(self, epoch: int, /) -> None:  # noqa: B027 only what is drawn whole has something to prepare
        """Prepare an epoch as a loop starts. Called on all ranks."""

    def num_blocks(self, _epoch: int, /) -> int:
        """Return the number of blocks of data that the positions of an epoch cycle through."""
        return 1

    def extra_state(self, _epoch: int, _position: int, /) -> dict[str, Any]:
        """Return the values that a state needs besides epoch and position; empty for most orders."""
        return {}

    def load_extra_state(self, epoch: int, state: Mapping[str, Any], /) -> None:  # noqa: B027 most have none
        """Load the values that `extra_state` returned in an epoch; DataStateError if they do not fit this order."""


class ComputedOrder(Order):
    """A base class of orders that compute the sample at a position; `built_from` is a size or a checksum."""

    def __init__(
        self,
        name: str,
        size: int,
        *,
        seed: int,
        phrase: str,  # for users; it may hold "{seed}"
        num_positions: int | None = None,
        built_from: int | None = None,
    ) -> None:
        super().__init__(name, seed=seed)
        self.size = size
        self.num_positions = size if num_positions is None else num_positions
        self._built_from = built_from
        self._phrase = phrase

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return self._phrase.replace("{seed}", str(self.seed))

    def length(self, _epoch: int) -> int:
        """Return the number of positions in an epoch."""
        return self.num_positions

    def identity(self) -> dict[str, Any]:
        """Return the values that describe what the order was built from."""
        found = {"num_positions": self.num_positions}
        return found if self._built_from is None else {**found, "built_from": self._built_from}

    @abstractmethod
    def take(self, epoch: int, positions: Positions, /) -> list[Any]:
        """Return the indices of the samples at positions in [0, length)."""

    def first_outside(self, num_samples: int) -> int | None:
        """Return an index of the order that a dataset of `num_samples` lacks; None if the dataset has all of them."""
        return self.size - 1 if self.size > num_samples else None


class SequentialOrder(ComputedOrder):
    """The dataset's own order; only the workers use the seed."""

    def __init__(self, size: int, *, seed: int) -> None:
        super().__init__("sequential", size, seed=seed, phrase="the dataset's own order")

    def take(self, _epoch: int, positions: Positions) -> list[int]:
        """Return the positions unchanged."""
        return positions.tolist()


class ShuffledOrder(ComputedOrder):
    """A keyed random order of all samples. After the dataset's last position, another permutation follows."""

    def __init__(self, size: int, *, seed: int, num_positions: int | None = None) -> None:
        name = f"shuffled/{ORDER_VERSION}"
        phrase = f"shuffled: permutation {ORDER_VERSION} keyed by (seed {{seed}}, epoch)"
        super().__init__(name, size, seed=seed, phrase=phrase, num_positions=num_positions, built_from=size)
        self._permutation = lru_cache(maxsize=2)(Permutation)

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """Return the indices of the samples at the given positions."""
        if self.num_positions <= self.size:
            return self._permutation(self.size, self.seed, epoch).at(positions).tolist()
        rounds, inside = np.divmod(positions, self.size)
        taken = np.empty_like(positions)
        for number in np.unique(rounds):
            chosen = rounds == number
            key = (self.seed, epoch, int(number)) if number else (self.seed, epoch)
            taken[chosen] = self._permutation(self.size, *key).at(inside[chosen])
        return taken.tolist()


class SubsetOrder(ShuffledOrder):
    """A shuffled order of the samples at the given indices."""

    def __init__(self, indices: Sequence[int] | Positions, *, seed: int) -> None:
        super().__init__(len(indices), seed=seed)
        self._indices = np.asarray(indices, dtype=np.int64)
        self._built_from = checksum_of(self._indices)
        self.name = f"subset-{self.name}"
        self._phrase = f"a subset of {len(self._indices)} samples, {self._phrase}"

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """Return the indices of the samples at the given positions."""
        return self._indices[np.asarray(super().take(epoch, positions), dtype=np.int64)].tolist()

    def first_outside(self, num_samples: int) -> int | None:
        """Return an index that a dataset lacks; negative indices count too, since they may name a sample twice."""
        outside = self._indices[(self._indices < 0) | (self._indices >= num_samples)]
        return int(outside[0]) if outside.size else None


class ReplacementOrder(ComputedOrder):
    """An order of samples drawn independently with replacement, with a bias below size / 2**64."""

    def __init__(self, size: int, *, seed: int, num_positions: int) -> None:
        name = f"replacement/{ORDER_VERSION}"
        phrase = f"drawn with replacement: hash {ORDER_VERSION} keyed by (seed {{seed}}, epoch)"
        super().__init__(name, size, seed=seed, phrase=phrase, num_positions=num_positions, built_from=size)

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """Return the indices of the samples at the given positions."""
        hashed = hash_words(positions.astype(np.uint64), hash_key(self.seed, epoch))
        return (hashed % np.uint64(self.size)).tolist()
