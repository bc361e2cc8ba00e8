"""The order of an epoch: the sample at each position, the same on every rank.

A computed order depends only on the epoch and on the values it was built from. It is independent of ranks, workers
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
    """A base class of orders: the samples, or the batches, of every epoch.

    Args:
        name: The name and version of the order in a saved position; a different name means a different order.
        seed: The seed from which, with the epoch, every order is derived; loading a state sets the saved seed.
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

    def extra_state(self, _epoch: int, _position: int, /) -> dict[str, Any]:
        """Return what a state must hold besides the epoch and the position: nothing, for most orders."""
        return {}

    def load_extra_state(self, epoch: int, state: Mapping[str, Any], /) -> None:  # noqa: B027 most have none
        """Load what `extra_state` returned in an epoch.

        Raises:
            DataStateError: The state does not fit this order.
        """


class SampleOrder(Order):
    """A base class of orders of samples, which can be read at any position."""

    @abstractmethod
    def take(self, epoch: int, positions: Positions, /) -> list[Any]:
        """Return the dataset indices or keys at positions in [0, length)."""

    def begin(self, epoch: int, /) -> None:
        """Prepare an epoch as a loop starts. Called on all ranks."""

    def num_blocks(self, _epoch: int, /) -> int:
        """Return the number of blocks of data that the positions of an epoch cycle through."""
        return 1


class ComputedOrder(SampleOrder):
    """A base class of orders whose sample at a position is computed.

    Args:
        name: The name and version of the order in a saved position.
        num_positions: The number of positions in every epoch.
        seed: The seed from which, with the epoch, every order is derived.
    """

    def __init__(self, name: str, num_positions: int, *, seed: int) -> None:
        super().__init__(name, seed=seed)
        self.num_positions = num_positions

    def length(self, _epoch: int) -> int:
        """Return the number of positions in an epoch."""
        return self.num_positions

    def identity(self) -> dict[str, Any]:
        """Return the values that describe what the order was built from."""
        return {"num_positions": self.num_positions}


class SequentialOrder(ComputedOrder):
    """The dataset's own order; the seed is that of the workers alone."""

    def __init__(self, size: int, *, seed: int) -> None:
        super().__init__("sequential", size, seed=seed)

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return "the dataset's own order"

    def take(self, _epoch: int, positions: Positions) -> list[int]:
        """Return the positions unchanged."""
        return positions.tolist()


class ShuffledOrder(ComputedOrder):
    """An order of every sample once, keyed and random; beyond the dataset's size, another permutation follows.

    Args:
        size: The number of samples in the dataset.
        seed: The seed from which, with the epoch, every order is derived.
        num_positions: The number of positions in an epoch; `size` by default.
        name: The name of the order in a saved position, without its version.
    """

    def __init__(
        self, size: int, *, seed: int, num_positions: int | None = None, name: str = "shuffled"
    ) -> None:
        super().__init__(
            f"{name}/{ORDER_VERSION}", size if num_positions is None else num_positions, seed=seed
        )
        self._size = size
        self._permutation = lru_cache(maxsize=2)(Permutation)

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"shuffled: permutation {ORDER_VERSION} keyed by (seed {self.seed}, epoch)"

    def identity(self) -> dict[str, Any]:
        """Return the values that describe what the order was built from."""
        return {**super().identity(), "built_from": self._size}

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """Return the indices of the samples at the given positions."""
        return self.at(epoch, positions).tolist()

    def at(self, epoch: int, positions: Positions) -> Positions:
        """Return the indices of the samples at the given positions, as an array."""
        if self.num_positions <= self._size:
            return self._permutation(self._size, self.seed, epoch).at(positions)
        rounds, inside = np.divmod(positions, self._size)
        taken = np.empty_like(positions)
        for number in np.unique(rounds):
            chosen = rounds == number
            key = (self.seed, epoch, int(number)) if number else (self.seed, epoch)
            taken[chosen] = self._permutation(self._size, *key).at(inside[chosen])
        return taken


class SubsetOrder(ShuffledOrder):
    """A shuffled subset of the samples.

    Args:
        indices: The indices of the samples in the subset.
        seed: The seed from which, with the epoch, every order is derived.
    """

    def __init__(self, indices: Sequence[int] | Positions, *, seed: int) -> None:
        super().__init__(len(indices), seed=seed, name="subset-shuffled")
        self._indices = np.asarray(indices, dtype=np.int64)

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"a subset of {len(self._indices)} samples, {super().source}"

    def identity(self) -> dict[str, Any]:
        """Return the values that describe what the order was built from."""
        return {**super().identity(), "built_from": checksum_of(self._indices)}

    def at(self, epoch: int, positions: Positions) -> Positions:
        """Return the indices of the samples at the given positions, as an array."""
        return self._indices[super().at(epoch, positions)]


class ReplacementOrder(ComputedOrder):
    """An order of samples drawn with replacement, independently at each position.

    Args:
        size: The number of samples in the dataset; the bias of a draw is below size / 2**64.
        seed: The seed from which, with the epoch, every order is derived.
        num_positions: The number of positions in an epoch.
    """

    def __init__(self, size: int, *, seed: int, num_positions: int) -> None:
        super().__init__(f"replacement/{ORDER_VERSION}", num_positions, seed=seed)
        self._size = size

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"drawn with replacement: hash {ORDER_VERSION} keyed by (seed {self.seed}, epoch)"

    def identity(self) -> dict[str, Any]:
        """Return the values that describe what the order was built from."""
        return {**super().identity(), "built_from": self._size}

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """Return the indices of the samples at the given positions."""
        hashed = hash_words(positions.astype(np.uint64), hash_key(self.seed, epoch))
        return (hashed % np.uint64(self._size)).tolist()
