"""The order of an epoch: the sample at each position, the same on every rank.

An order depends only on the epoch and on the values it was built from. It is independent of ranks, workers and batch
sizes, so any of these may change in the middle of an epoch.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from drivetrain_data.randomness.permutation import ORDER_VERSION, Permutation, Positions, hash_key, hash_words
from drivetrain_data.sampling.indices import checksum_of


class Order(Protocol):
    """An order of samples for every epoch."""

    @property
    def seed(self) -> int:
        """The seed of the order of every epoch; loading a state sets the saved seed."""
        ...

    @seed.setter
    def seed(self, seed: int) -> None: ...

    @property
    def name(self) -> str:
        """The name and version of the order in a saved position; a different name means a different order."""
        ...

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        ...

    def length(self, epoch: int, /) -> int:
        """Return the number of positions in an epoch."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the values, besides the name, that must match those of a saved position."""
        ...

    def take(self, epoch: int, positions: Positions, /) -> list[Any]:
        """Return the dataset indices or keys at positions in [0, length)."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """An order, or a sampler of a user's batches, whose state is more than the position."""

    def extra_state(self, epoch: int, position: int, /) -> dict[str, Any]:
        """Return what a state must hold besides the epoch and the position."""
        ...

    def resume(self, epoch: int, state: Mapping[str, Any], /) -> None:
        """Resume an epoch from a saved state.

        Raises:
            DataStateError: The state does not fit this order.
        """
        ...


class SequentialOrder:
    """The dataset's own order."""

    name = "sequential"
    source = "the dataset's own order"

    def __init__(self, size: int, *, seed: int) -> None:
        self.size = size
        self.seed = seed  # seeds the workers only; the order does not depend on it

    def length(self, _epoch: int) -> int:
        """Return the number of positions in an epoch."""
        return self.size

    def identity(self) -> dict[str, Any]:
        """Return the values that describe what the order was built from."""
        return {"num_positions": self.size}

    def take(self, _epoch: int, positions: Positions) -> list[int]:
        """Return the positions unchanged."""
        return positions.tolist()


class ShuffledOrder:
    """An order of every sample once, keyed and random; beyond the dataset's size, another permutation follows.

    Args:
        size: The number of samples in the dataset.
        seed: The seed from which, with the epoch, every order is derived.
        num_positions: The number of positions in an epoch; `size` by default.
    """

    def __init__(self, size: int, *, seed: int, num_positions: int | None = None) -> None:
        self.size = size
        self.seed = seed
        self.num_positions = size if num_positions is None else num_positions
        self._permutation = lru_cache(maxsize=2)(Permutation)

    @property
    def name(self) -> str:
        """The name of the order in a saved position."""
        return f"shuffled/{ORDER_VERSION}"

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"shuffled: permutation {ORDER_VERSION} keyed by (seed {self.seed}, epoch)"

    def length(self, _epoch: int) -> int:
        """Return the number of positions in an epoch."""
        return self.num_positions

    def identity(self) -> dict[str, Any]:
        """Return the values that describe what the order was built from."""
        return {"num_positions": self.num_positions, "built_from": self.size}

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


class ReplacementOrder:
    """An order of samples drawn with replacement, independently at each position.

    Args:
        size: The number of samples in the dataset; the bias of a draw is below size / 2**64.
        seed: The seed from which, with the epoch, every order is derived.
        num_positions: The number of positions in an epoch.
    """

    def __init__(self, size: int, *, seed: int, num_positions: int) -> None:
        self.size = size
        self.seed = seed
        self.num_positions = num_positions

    @property
    def name(self) -> str:
        """The name of the order in a saved position."""
        return f"replacement/{ORDER_VERSION}"

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"drawn with replacement: hash {ORDER_VERSION} keyed by (seed {self.seed}, epoch)"

    def length(self, _epoch: int) -> int:
        """Return the number of positions in an epoch."""
        return self.num_positions

    def identity(self) -> dict[str, Any]:
        """Return the values that describe what the order was built from."""
        return {"num_positions": self.num_positions, "built_from": self.size}

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """Return the indices of the samples at the given positions."""
        hashed = hash_words(positions.astype(np.uint64), hash_key(self.seed, epoch))
        return (hashed % np.uint64(self.size)).tolist()


class SubsetOrder:
    """A shuffled subset of the samples.

    Args:
        indices: The indices of the samples in the subset.
        seed: The seed from which, with the epoch, every order is derived.
    """

    def __init__(self, indices: Sequence[int] | Positions, *, seed: int) -> None:
        self._indices = np.asarray(indices, dtype=np.int64)
        self._inner = ShuffledOrder(len(indices), seed=seed)

    @property
    def seed(self) -> int:
        """The seed of the order of every epoch."""
        return self._inner.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._inner.seed = seed

    @property
    def name(self) -> str:
        """The name of the order in a saved position."""
        return f"subset-{self._inner.name}"

    @property
    def source(self) -> str:
        """The origin of the order, as a phrase for users."""
        return f"a subset of {len(self._indices)} samples, {self._inner.source}"

    def length(self, _epoch: int) -> int:
        """Return the number of positions in an epoch."""
        return len(self._indices)

    def identity(self) -> dict[str, Any]:
        """Return the values that describe what the order was built from."""
        return {"num_positions": len(self._indices), "built_from": checksum_of(self._indices)}

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """Return the indices of the samples at the given positions."""
        return self._indices[np.asarray(self._inner.take(epoch, positions), dtype=np.int64)].tolist()
