"""The order of an epoch: which sample stands at each position, the same on every rank.

Each order is a function of an epoch's number and of what it was built from. Ranks, workers and batch sizes play no
part, so any of them may change in the middle of an epoch.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import index
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

import numpy as np
import numpy.typing as npt
from torch.utils.data import WeightedRandomSampler

from drivetrain_data.errors import IndexRangeError
from drivetrain_data.permutation import ORDER_VERSION, Permutation, Positions, hash_key, hash_words
from drivetrain_data.rng import KeyedDraws
from drivetrain_data.sampler_state import Drawn, EpochStart


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


class DrawnOrder:
    """What a sampler draws, with every generator that it can be using seeded from (seed, epoch).

    An epoch is drawn whole at its start, which touches no data; a resume draws it again.

    Args:
        sampler: The user's, with a length.
        seed: The seed of all epochs.
        size: The samples of the dataset, to check indices against; None if that is not known.
    """

    def __init__(self, sampler: Any, *, seed: int, size: int | None) -> None:
        self.sampler = sampler
        self.seed = seed
        self.size = size
        self._drawn: tuple[int, int, Any] | None = None
        self._summary = Drawn(0, 0)
        self._state: dict[
            str, Any
        ] = {}  # of the epoch drawn; built once, since it is asked for at every step
        self._start = EpochStart(sampler)

    @property
    def name(self) -> str:
        """What a saved position names it by."""
        return f"drawn:{type(self.sampler).__name__}"

    @property
    def source(self) -> str:
        """Where the order comes from."""
        return f"{type(self.sampler).__name__}, {self._start.how(self.seed)}"

    def length(self, epoch: int) -> int:
        """The positions in an epoch: those drawn, or before that what the sampler says."""
        if self._drawn is not None and self._drawn[:2] == (self.seed, epoch):
            return len(self._drawn[2])
        return self._start.length(self.seed, epoch)

    def identity(self) -> dict[str, Any]:
        """What the sampler was built from, as far as it can be seen; what it drew is in the state."""
        found: dict[str, Any] = {"num_positions": self._start.fixed_length}
        if type(self.sampler) is WeightedRandomSampler:
            found["built_from"] = checksum_of(self.sampler.weights.numpy())
        return found

    def take(self, epoch: int, positions: Positions) -> list[Any]:
        """The samples at positions."""
        drawn = self._draw(epoch)
        return (
            drawn[positions].tolist()
            if isinstance(drawn, np.ndarray)
            else [drawn[p] for p in positions.tolist()]
        )

    def checksum(self, epoch: int) -> int:
        """Of what is drawn in an epoch."""
        self._draw(epoch)
        return self._summary.checksum

    def extra_state(self, epoch: int, position: int) -> dict[str, Any]:
        """What leads to an epoch, and if it is begun a checksum of what was drawn."""
        if position and self._drawn is not None and self._drawn[1] == epoch:
            return self._state
        return self._start.state(epoch)

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw an epoch as the run did that was saved in it."""
        self._start.resume(epoch, state)
        self._drawn = None

    def _draw(self, epoch: int) -> Any:
        if self._drawn is None or self._drawn[:2] != (self.seed, epoch):
            self._start.begin(self.seed, epoch)
            with KeyedDraws(self.seed, epoch).active():
                items = list(self.sampler)
            self._start.finish()
            drawn = as_indices(items, self.size, self.sampler)
            self._summary = Drawn(len(drawn), checksum_of(drawn))
            self._start.check(epoch, self._summary)
            self._state = self._start.state(epoch, self._summary)
            self._drawn = (self.seed, epoch, drawn)
        return self._drawn[2]


def as_indices(items: list[Any], size: int | None, sampler: object) -> Positions | list[Any]:
    """What a sampler drew, as whole numbers, held against the dataset's length; or as it is, if it drew other keys.

    Args:
        items: What it drew.
        size: The samples of the dataset; None if that is not known.
        sampler: To name in errors.

    Raises:
        IndexRangeError: An index lies outside, or is none.
    """
    try:
        indices = np.fromiter(map(index, items), dtype=np.int64, count=len(items))
    except (TypeError, OverflowError):
        _check_keys(items, size, sampler)
        return items
    if size is not None:
        outside = np.flatnonzero((indices < -size) | (indices >= size))
        if outside.size:
            raise outside_of(int(indices[outside[0]]), size, sampler)
    return indices


def outside_of(given: int, size: int, sampler: object) -> IndexRangeError:
    """The error for an index that a dataset does not have."""
    return IndexRangeError(
        f"{type(sampler).__name__} gave index {given}, and the dataset has {size} samples (0 to {size - 1}); "
        "build the sampler for this dataset"
    )


def checksum_of(drawn: npt.NDArray[Any] | Sequence[Any], before: int = 0) -> int:
    """A checksum of indices, weights or keys, going on from that of what came before."""
    if isinstance(drawn, np.ndarray):
        return crc32(np.ascontiguousarray(drawn).data, before)
    return crc32(
        repr([key if isinstance(key, _PLAIN) else type(key).__name__ for key in drawn]).encode(), before
    )


_PLAIN = (str, bytes, int, float, tuple)


def _check_keys(items: list[Any], size: int | None, sampler: object) -> None:
    """Keys of a dataset may be of any kind, but for nothing and fractions, and not mixed with indices."""
    for number, item in enumerate(items):
        if item is None or isinstance(item, float) or isinstance(item, int) != isinstance(items[0], int):
            raise IndexRangeError(
                f"{type(sampler).__name__} gave {item!r} as its number {number}: a dataset is indexed with whole "
                "numbers, or with keys throughout; let the sampler give one or the other"
            )
        if isinstance(item, int) and size is not None and not -size <= item < size:
            raise outside_of(item, size, sampler)
