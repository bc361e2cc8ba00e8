"""Orders that keep reads local: one block of the data for each shard, or shuffled runs of neighbouring samples."""

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol, cast, runtime_checkable
from zlib import crc32

import numpy as np

from drivetrain_data.errors import DataStateError, IndexRangeError
from drivetrain_data.randomness.permutation import ORDER_VERSION, Permutation, Positions, hash_key
from drivetrain_data.sampling.order import ComputedOrder
from drivetrain_data.shard import Shard

_CHECKED_WHOLE = 2**20  # up to this many samples, a function is checked at every position

logger = logging.getLogger(__name__)


class IndexFunction(Protocol):
    """A user's function that assigns samples to shards; a pure function of its two arguments.

    Each of `count` shards has `size // count` positions (the first `size % count` shards have one more). Over all
    shards and their positions, every sample occurs exactly once.
    """

    def __call__(self, position: int, shard: Shard, /) -> int:
        """Return the index of the sample at a position within a shard, counted from 0."""
        ...


@runtime_checkable
class InvertibleIndexFunction(IndexFunction, Protocol):
    """An index function with an inverse, so that a different number of shards can resume an epoch in the middle."""

    def inverse(self, index: int, num_shards: int, /) -> tuple[int, int]:
        """Return a sample's position within its shard, and the index of that shard."""
        ...


class BlockOrder(ComputedOrder):
    """An order that cycles through blocks of the data, each in its own order, in sequence or shuffled in each epoch.

    Position p is sample p // num_blocks of block p % num_blocks, so that the samples read are a prefix of the order.
    Blocks are contiguous and their sizes differ by at most one, unless a user's function assigns the samples. If a
    resume makes shards leave their blocks, the rank with `warns` logs a warning.
    """

    def __init__(
        self,
        size: int,
        num_blocks: int,
        *,
        seed: int,
        shuffled: bool,
        function: IndexFunction | None = None,
        warns: bool = True,
    ) -> None:
        kind, held = "blocks", f"{num_blocks} contiguous blocks"
        if function is not None:
            kind = f"function:{_name(function)}"
            held = f"what {_name(function)} gives each of {num_blocks} shards"
        read = "in sequence"
        if shuffled:
            read = f"each shuffled by permutation {ORDER_VERSION} keyed by (seed {{seed}}, epoch, block)"
        name = f"{kind}, {'shuffled' if shuffled else 'sequential'}/{ORDER_VERSION}"
        super().__init__(name, size, seed=seed, phrase=f"{held}, {read}")
        self._num_blocks = num_blocks
        self._shuffled = shuffled
        self._function = function
        self._warns = warns
        self._resumed: tuple[int, int] | None = None  # a resumed epoch and its original number of blocks
        self._permutation = lru_cache(maxsize=num_blocks)(Permutation)
        # The number of shards -> the checksum of the function's values.
        self._checksums = {} if function is None else {num_blocks: check_function(function, size, num_blocks)}

    def num_blocks(self, epoch: int) -> int:
        """Return the number of blocks of an epoch; a resumed epoch keeps its original number."""
        return self._resumed[1] if self._resumed and self._resumed[0] == epoch else self._num_blocks

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """Return the indices of the samples at the given positions."""
        num_blocks = self.num_blocks(epoch)
        numbers, blocks = np.divmod(positions, num_blocks)
        taken = np.empty_like(positions)
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            taken[chosen] = self._in_block(epoch, num_blocks, block, numbers[chosen])
        return taken.tolist()

    def extra_state(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the number of blocks of an epoch in progress, and a checksum of the function's values."""
        if not position:
            return {}
        num_blocks = self.num_blocks(epoch)
        checksum = {} if self._function is None else {"function": self._checksums[num_blocks]}
        return {"num_blocks": num_blocks, **checksum}

    def load_extra_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Resume an epoch with its original number of blocks; DataStateError if the function differs."""
        num_blocks: int = state.get("num_blocks", self._num_blocks)
        if num_blocks != self._num_blocks and not isinstance(self._function, InvertibleIndexFunction | None):
            raise DataStateError(
                f"the loader's state was saved in an epoch that {num_blocks} shards read by "
                f"{_name(self._function)}, and here are {self._num_blocks}: resume with {num_blocks}, or give "
                "the function inverse(index, num_shards) -> (position, shard index)"
            )
        if self._function is not None:
            if num_blocks not in self._checksums:
                self._checksums[num_blocks] = check_function(self._function, self.size, num_blocks)
            own = self._checksums[num_blocks]
            if state.get("function", own) != own:
                raise DataStateError(
                    "the loader's state was saved in an epoch that was read by another function than "
                    f"{_name(self._function)}, or by one that gave other samples: samples would be lost or repeated; "
                    "pass the same function as strategy=, or start the epoch again"
                )
        if num_blocks != self._num_blocks and self._warns:
            logger.warning(
                "epoch %d was begun with %d blocks of the data, and there are %d now: its rest is read by the old "
                "blocks, so that shards leave theirs until the epoch ends",
                epoch,
                num_blocks,
                self._num_blocks,
            )
        self._resumed = (epoch, num_blocks)
        self._permutation = lru_cache(maxsize=max(num_blocks, self._num_blocks))(Permutation)

    def _in_block(self, epoch: int, num_blocks: int, block: int, numbers: Positions) -> Positions:
        size, larger = divmod(self.size, num_blocks)
        length = size + (block < larger)
        if self._shuffled:
            numbers = self._permutation(length, self.seed, epoch, block).at(numbers)
        if self._function is None:
            return numbers + (block * size + min(block, larger))
        function = self._function
        indices = _values(function, numbers, Shard(block, num_blocks), self.size)
        if num_blocks == self._num_blocks or not isinstance(function, InvertibleIndexFunction):
            return indices
        for number, index in zip(numbers.tolist(), indices.tolist(), strict=True):
            inverse = tuple(function.inverse(index, num_blocks))
            if inverse != (number, block):
                raise IndexRangeError(
                    f"{_name(function)} gave index {index} for position {number} of shard {block} of "
                    f"{num_blocks}, and its inverse says position {inverse[0]} of shard {inverse[1]}: one of them is "
                    "wrong, and samples would be lost"
                )
        return indices


def check_function(function: IndexFunction, size: int, num_shards: int) -> int:
    """Check that a function returns every sample once over all shards, and return a checksum of its values.

    Up to 2**20 samples, every position is checked; above, 2**16 positions, evenly spaced on each shard.
    IndexRangeError if the dataset lacks a sample; ValueError if a sample comes twice. The message names the sample.
    """
    given = np.empty(0, dtype=np.int64)
    places: list[Positions] = []
    for index in range(num_shards):
        length = size // num_shards + (index < size % num_shards)
        positions = np.arange(length)
        if size > _CHECKED_WHOLE:
            number = max(2, min(length, _CHECKED_WHOLE // 16 // num_shards))
            positions = np.unique(np.linspace(0, max(length - 1, 0), number).astype(np.int64))
        given = np.append(given, _values(function, positions, Shard(index, num_shards), size))
        places.append(np.stack([positions, np.full_like(positions, index)], axis=1))
    found, first, counts = np.unique(given, return_index=True, return_counts=True)
    if len(found) < len(given):
        where = np.concatenate(places)
        sample, one = int(found[counts > 1][0]), first[counts > 1][0]
        other = np.flatnonzero(given == sample)[1]
        said = [f"position {where[i][0]} of shard {where[i][1]}" for i in (one, other)]
        raise ValueError(
            f"strategy={_name(function)} gives sample {sample} twice, for {said[0]} and for {said[1]} of "
            f"{num_shards}: over all shards, each of the {size} samples must come exactly once, so that none is lost"
        )
    return crc32(given.data)


def _values(function: IndexFunction, positions: Positions, shard: Shard, size: int) -> Positions:
    """Return a function's checked values at positions of a shard."""
    given = [function(position, shard) for position in cast("list[int]", positions.tolist())]
    for position, index in zip(positions.tolist(), given, strict=True):
        if not hasattr(index, "__index__"):
            raise ValueError(
                f"strategy={_name(function)} gave {index!r} for position {position} of shard {shard.index} of "
                f"{shard.count}: must be a whole number, the index of a sample"
            )
        if not 0 <= index < size:
            raise IndexRangeError(
                f"{_name(function)} gave index {index} for position {position} of shard {shard.index} of "
                f"{shard.count}, and the dataset has {size} samples (0 to {size - 1})"
            )
    return np.asarray(given, dtype=np.int64)


class BlockShuffledOrder(ComputedOrder):
    """A random order of runs of neighbouring samples, with each run shuffled too; it keeps random access local.

    A shorter last run gets a random place too.
    """

    def __init__(self, size: int, block_size: int, *, seed: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size!r}: a block holds at least 1 sample")
        phrase = (
            f"blocks of {block_size} neighbours, shuffled and each shuffled within: permutation {ORDER_VERSION} "
            "keyed by (seed {seed}, epoch)"
        )
        name = f"shuffled in blocks of {block_size}/{ORDER_VERSION}"
        super().__init__(name, size, seed=seed, phrase=phrase)
        self._block_size = block_size
        self._blocks = lru_cache(maxsize=2)(Permutation)

    def take(self, epoch: int, positions: Positions) -> list[int]:
        """Return the indices of the samples at the given positions."""
        num_whole, rest = divmod(self.size, self._block_size)
        short_at = hash_key(self.seed, epoch, 1) % (num_whole + 1) * self._block_size
        in_short = (positions >= short_at) & (positions < short_at + rest)
        whole = np.where(positions < short_at, positions, positions - rest)
        places, within = np.divmod(whole, self._block_size)
        blocks = np.full_like(positions, num_whole)  # the short run
        if num_whole:
            blocks[~in_short] = self._blocks(num_whole, self.seed, epoch, 0).at(places[~in_short])
        within[in_short] = positions[in_short] - short_at
        taken = np.empty_like(positions)
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            length = rest if block == num_whole else self._block_size
            inside = Permutation(length, self.seed, epoch, 2, block).at(within[chosen])
            taken[chosen] = inside + block * self._block_size
        return taken.tolist()


def _name(function: IndexFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)
