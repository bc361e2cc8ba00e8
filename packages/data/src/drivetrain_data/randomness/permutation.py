"""A keyed bijection on [0, n): a random order without a list.

The index at each position is computed independently: shuffling needs no memory that grows with the dataset, and a
resume starts at any position in constant time. Up to 2**20 samples, the order is the argsort of a keyed 64-bit hash.
Above, it is a Feistel network (Luby and Rackoff, 1988) over the next power of two, with cycle walking (Black and
Rogaway, 2002) and a keyed swap of two indices, because a Feistel network alone is an even permutation.

A published order never changes: `ORDER_VERSION` numbers the published orders, and tests check golden vectors.
"""

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1
MAX_SIZE = 2**62

Positions = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_TABLE_LIMIT = 2**20
_NUM_ROUNDS = 10
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: SplitMix64's increment
_MIX_1 = 0xBF58476D1CE4E5B9  # the finalizer of SplitMix64 (Steele, Lea, Flood 2014; Stafford's variant 13)
_MIX_2 = 0x94D049BB133111EB


class Permutation:
    """A pseudo-random order of `size` samples, 0 to 2**62, by a key of non-negative integers such as (seed, epoch).

    Up to 2**20 samples, the first use computes the full order and keeps it, at 8 bytes per sample.
    """

    def __init__(self, size: int, *key: int) -> None:
        if not 0 <= size <= MAX_SIZE:
            raise ValueError(f"size={size!r}: a permutation orders 0 to 2**62 samples")
        self.size = size
        self.key = key
        base = hash_key(*key)
        self._keys = tuple(_mix_one(base + number * _GOLDEN) for number in range(1, _NUM_ROUNDS + 1))
        self._table: Positions | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> int:
        """Return the index at one position."""
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} of a permutation of {self.size}")
        return int(self.at(np.array([position], dtype=np.int64))[0])

    def at(self, positions: Positions) -> Positions:
        """Return the indices at positions in [0, size), in the shape of `positions`.

        Pass thousands of positions per call: a call with one position costs nearly as much as one with 1,000.
        """
        if self.size <= _TABLE_LIMIT:
            if self._table is None:
                self._table = _table(self.size, self._keys)
            return self._table[positions]
        # Encipher until every index is below `size`: under two rounds on average, since the domain is < 2 * size.
        num_bits = (self.size - 1).bit_length()
        indices = _encipher(positions.astype(np.uint64).ravel(), num_bits, self._keys)
        outside = np.flatnonzero(indices >= self.size)
        while outside.size:
            indices[outside] = _encipher(indices[outside], num_bits, self._keys)
            outside = outside[indices[outside] >= self.size]
        if _mix_one(self._keys[-1] + _GOLDEN) & 1:  # another bit of the key makes the permutation odd
            indices ^= indices < 2  # swaps indices 0 and 1
        return indices.astype(np.int64).reshape(positions.shape)


def hash_key(*key: int) -> int:
    """Return a 64-bit hash that depends on every bit of every part of the key."""
    state = _mix_one(len(key) + _GOLDEN)
    for part in key:
        if part < 0:
            raise ValueError(f"key part {part}: must not be negative")
        state = _mix_one((state ^ (part & _WORD)) + _GOLDEN)
        state = _mix_one((state ^ (part >> 64)) + _GOLDEN)
    return state


def hash_words(words: _Words, key: int) -> _Words:
    """Apply two keyed passes of SplitMix64's finalizer to `words`; a bijection of 64-bit words."""
    mixed = _mix(words * np.uint64(_GOLDEN) + np.uint64(key))
    return _mix(mixed ^ np.uint64(_mix_one(key ^ _WORD)))


def _table(size: int, keys: tuple[int, ...]) -> Positions:
    """Return the whole order: the stable argsort of the hashes by 16-bit digits, which NumPy radix-sorts."""
    hashes = hash_words(np.arange(size, dtype=np.uint64), keys[0])
    table = np.arange(size, dtype=np.int64)
    for shift in range(0, 64, 16):
        digits = (hashes >> np.uint64(shift)).astype(np.uint16)
        table = table[np.argsort(digits[table], kind="stable")]
    return table


def _encipher(values: _Words, num_bits: int, keys: tuple[int, ...]) -> _Words:
    """Apply one pass of an alternating Feistel network over `num_bits` bits, whose halves may differ by one bit."""
    low_bits = np.uint64(num_bits // 2)
    low_mask = np.uint64((1 << (num_bits // 2)) - 1)
    high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (_mix(high * np.uint64(_GOLDEN) + np.uint64(key)) & low_mask)
        else:
            high = high ^ (_mix(low * np.uint64(_GOLDEN) + np.uint64(key)) & high_mask)
    return (high << low_bits) | low


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2)
    return words ^ (words >> np.uint64(31))


def _mix_one(word: int) -> int:
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)
