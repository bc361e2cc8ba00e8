"""The order of an epoch: which sample stands at each position, the same on every rank.

Each order is a function of an epoch's number and of what it was built from. Ranks, workers and batch sizes play no
part, so any of them may change in the middle of an epoch.
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
        """What the order of every epoch depends on; a resume sets the one it was saved with."""
        ...

    @seed.setter
    def seed(self, seed: int) -> None: ...

    @property
    def name(self) -> str:
        """What a saved position names it by; another name or version is another order."""
        ...

    @property
    def source(self) -> str:
        """Where the order comes from, as one phrase for people."""
        ...

    def length(self, epoch: int, /) -> int:
        """The positions in an epoch."""
        ...

    def identity(self) -> dict[str, Any]:
        """What a saved position must agree on besides the name: what the order was built from."""
        ...

    def take(self, epoch: int, positions: Positions, /) -> list[Any]:
        """What a dataset is to be indexed with, for positions in [0, length)."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """An order, or a user's batches, of which a state must hold more than the position."""

    def extra_state(self, epoch: int, position: int, /) -> dict[str, Any]:
        """What a state must hold besides the epoch and the position."""
        ...

    def resume(self, epoch: int, state: Mapping[str, Any], /) -> None:
        """Go on with an epoch from a saved state.

        Raises:
            DataStateError: It cannot be taken up here.
        """
        ...


class SequentialOrder:
    """The dataset's own order."""

    name = "sequential"
    source = "the dataset's own order"

    def __init__(self, size: int, *, seed: int) -> None:
        self.size = size
        self.seed = seed  # for workers; of no consequence to the order

    def length(self, _epoch: int) -> int:
        """The positions in an epoch."""
        return self.size

    def identity(self) -> dict[str, Any]:
        """What it was built from."""
        return {"num_positions": self.size}

    def take(self, _epoch: int, positions: Positions) -> list[int]:
        """The positions themselves."""
        return positions.tolist()


class ShuffledOrder:
    """Every sample once in a keyed random order; beyond the dataset's size, another permutation follows.

    Args:
        size: The number of samples in the dataset.
        seed: The seed of all epochs.
        num_positions: The positions in an epoch; `size` by default.
    """

    def __init__(self, size: int, *, seed: int, num_positions: int | None = None) -> None:
        self.size = size
        self.seed = seed
        self.num_positions = size if num_positions is None else num_positions
        self._permutation = lru_cache(maxsize=2)(Permutation)

    @property
    def name(self) -> str:
        """What a saved position names it by."""
        return f"shuffled/{ORDER_VERSION}"

    @property
    def source(self) -> str:
        """Where the order comes from."""
        return f"shuffled: permutation {ORDER_VERSION} keyed by (seed {self.seed}, epoch)"

    def length(self, _epoch: int) -> int:
        """The positions in an epoch."""
        return self.num_positions

    def identity(self) -> dict[str, Any]:
        """What it was built from."""
        return {"num_positions": self.num_positions, "built_from": self.size}

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """The samples at positions."""
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
    """Samples drawn with replacement, each position for itself.

    Args:
        size: The number of samples in the dataset; the bias of a draw is below size / 2**64.
        seed: The seed of all epochs.
        num_positions: The positions in an epoch.
    """

    def __init__(self, size: int, *, seed: int, num_positions: int) -> None:
        self.size = size
        self.seed = seed
        self.num_positions = num_positions

    @property
    def name(self) -> str:
        """What a saved position names it by."""
        return f"replacement/{ORDER_VERSION}"

    @property
    def source(self) -> str:
        """Where the order comes from."""
        return f"drawn with replacement: hash {ORDER_VERSION} keyed by (seed {self.seed}, epoch)"

    def length(self, _epoch: int) -> int:
        """The positions in an epoch."""
        return self.num_positions

    def identity(self) -> dict[str, Any]:
        """What it was built from."""
        return {"num_positions": self.num_positions, "built_from": self.size}

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """The samples at positions."""
        hashed = hash_words(positions.astype(np.uint64), hash_key(self.seed, epoch))
        return (hashed % np.uint64(self.size)).tolist()


class SubsetOrder:
    """A shuffled choice of samples.

    Args:
        indices: The samples.
        seed: The seed of all epochs.
    """

    def __init__(self, indices: Sequence[int] | Positions, *, seed: int) -> None:
        self._indices = np.asarray(indices, dtype=np.int64)
        self._inner = ShuffledOrder(len(indices), seed=seed)

    @property
    def seed(self) -> int:
        """What the order of every epoch depends on."""
        return self._inner.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._inner.seed = seed

    @property
    def name(self) -> str:
        """What a saved position names it by."""
        return f"subset-{self._inner.name}"

    @property
    def source(self) -> str:
        """Where the order comes from."""
        return f"a subset of {len(self._indices)} samples, {self._inner.source}"

    def length(self, _epoch: int) -> int:
        """The positions in an epoch."""
        return len(self._indices)

    def identity(self) -> dict[str, Any]:
        """What it was built from."""
        return {"num_positions": len(self._indices), "built_from": checksum_of(self._indices)}

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """The samples at positions."""
        return self._indices[np.asarray(self._inner.take(epoch, positions), dtype=np.int64)].tolist()
