"""A random order without a list: a keyed bijection on [0, n), any position of which is computed alone.

Up to 2**20 positions the order is a stable sort by a keyed 64-bit hash, which can reach every order. Above, it is a
Feistel network (Luby and Rackoff, 1988) with cycle walking (Black and Rogaway, 2002): no memory, and any position in
microseconds. Neither depends on torch's or NumPy's generators: the order of a seed is the same for ever, and
`VERSION` counts the orders there have been.
"""

import numpy as np
from numpy.typing import NDArray

VERSION = 1
_SORTED_UP_TO = 2**20
_ROUNDS = 10
_Integers = NDArray[np.uint64]


class Permutation:
    """A random order of n positions.

    Args:
        length: n, from 0 to 2**62.
        seed: The seed of the run.
        epoch: The epoch; each has an order of its own.
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        if not 0 <= length <= 2**62:
            raise ValueError(f"length={length}: must lie between 0 and 2**62")
        self.length = length
        base = _mix(np.array([seed & (2**64 - 1)], dtype=np.uint64))
        self._key = _mix(base ^ _mix(np.array([epoch + 1], dtype=np.uint64)))
        self._sorted = self._sort() if length <= _SORTED_UP_TO else None

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at positions of the order.

        Args:
            positions: Integers in [0, n), of any shape.

        Returns:
            The samples, each in [0, n), in the same shape.
        """
        if self._sorted is not None:
            return self._sorted[positions]
        found = self._feistel(positions.astype(np.uint64))
        while (outside := found >= self.length).any():
            found[outside] = self._feistel(found[outside])
        return found.astype(np.int64)

    def _sort(self) -> NDArray[np.int64]:
        hashes = _mix(np.arange(self.length, dtype=np.uint64) ^ self._key)
        return np.argsort(_mix(hashes + self._key), kind="stable")

    def _feistel(self, values: _Integers) -> _Integers:
        """A bijection on [0, 2**bits), the smallest power of two that holds n."""
        bits = max(2, (self.length - 1).bit_length())
        low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        low_mask, high_mask = (np.uint64((1 << int(b)) - 1) for b in (low_bits, high_bits))
        low, high = values & low_mask, values >> low_bits
        for i in range(_ROUNDS):
            key = _mix(self._key + np.uint64(i))
            if i % 2 == 0:
                high ^= _mix(low ^ key) & high_mask
            else:
                low ^= _mix(high ^ key) & low_mask
        return (high << low_bits) | low


def _mix(values: _Integers) -> _Integers:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): each input bit moves every output bit."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
