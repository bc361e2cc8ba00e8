"""Describe a sample in a few plain values, so that ranks can tell whether they have read the same sample."""

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, cast
from zlib import crc32

import numpy as np
import torch

Signature: TypeAlias = Any
# Where in the data a sample was read: its index, or the worker, its step, and the place in it.
Place: TypeAlias = int | tuple[int, ...]

_NUM_VALUES = 64
_MOST_PARTS, _DEEPEST = 5_000, 50
# Machines differ in the last bits of what they compute, and in the lowest bit or two of an image that they decode.
_RELATIVE, _OF_BYTES = 1e-4, 4


class Numbers(NamedTuple):
    """Evenly spaced numbers of an array, and the largest difference at which two numbers count as the same."""

    shape: tuple[int, ...]
    values: tuple[complex, ...]
    tolerance: float


class Reduced(NamedTuple):
    """An object as `pickle` reduces it: the name of its class and the signatures of its parts."""

    kind: str
    parts: list[Signature]


def signature_of(sample: Any) -> Signature:
    """Return the signature of a sample of any kind; None for parts that cannot be described."""
    return _Walk().describe(sample)


class _Walk:
    """A walk through a sample with a limit, because a sample may refer to itself or to much of the program."""

    def __init__(self) -> None:
        self._above: list[Any] = []  # the objects that the walk is in
        self._num_left = _MOST_PARTS

    def describe(self, part: Any) -> Signature:
        self._num_left -= 1
        if self._num_left < 0 or len(self._above) > _DEEPEST or any(part is one for one in self._above):
            return None
        self._above.append(part)
        try:
            return self._described(part)
        except Exception:  # noqa: BLE001 any object may refuse to be looked into, as locks and open files do
            return None
        finally:
            self._above.pop()

    def _described(self, part: Any) -> Signature:
        if isinstance(part, torch.Tensor) and part.layout is torch.strided and not part.is_nested:
            if part.is_meta:
                return None
            flat = part.int_repr() if part.is_quantized else part.detach()
            if flat.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
                flat = flat.float()  # NumPy has none of these dtypes
            return _of_array(flat.cpu().numpy())
        if isinstance(part, np.ndarray | np.generic | float | complex):
            array = np.asarray(part)
            return self.describe(array.ravel().tolist()) if array.dtype.hasobject else _of_array(array)
        if isinstance(part, os.PathLike):
            part = os.fspath(cast("os.PathLike[str]", part))
        if isinstance(part, str):  # nodes may keep copies of a file in folders of their own
            return os.path.basename(part) if os.path.isabs(part) else crc32(part.encode(errors="replace"))
        if isinstance(part, bytes | bytearray):
            return crc32(part)
        if part is None or isinstance(part, int):
            return "None" if part is None else part
        if isinstance(part, Mapping):
            entries = cast("Mapping[Any, Any]", part)
            # The text of a key, without an object's address.
            named = ((type(key).__name__ if " at 0x" in repr(key) else repr(key), key) for key in entries)
            chosen = _some(sorted(named, key=lambda pair: pair[0]))
            return [len(entries), *((name, self.describe(entries[key])) for name, key in chosen)]
        if isinstance(part, set | frozenset):  # each process has an order of its own
            members = cast("frozenset[Any]", part)
            if len(members) > self._num_left:
                return [len(members)]
            return [len(members), *sorted(repr(self.describe(one)) for one in members)[:_NUM_VALUES]]
        if isinstance(part, list | tuple):
            return [len(cast("Any", part)), *map(self.describe, _some(cast("Sequence[Any]", part)))]
        if hasattr(part, "tobytes"):  # an image
            return _of_array(np.frombuffer(cast("Any", part).tobytes(), dtype=np.uint8))
        if hasattr(part, "__next__"):
            return None
        reduced = part.__reduce_ex__(2)
        if isinstance(reduced, str):
            return Reduced(type(part).__name__, [reduced])
        given = [*reduced[1:3], *(list(islice(items, _NUM_VALUES)) for items in reduced[3:5] if items)]
        return Reduced(type(part).__name__, [self.describe(each) for each in given if each is not None])


def settled(reads: Mapping[Place, Signature], again: Mapping[Place, Signature]) -> dict[Place, Signature]:
    """Return signatures without the parts of objects that do not belong to the samples.

    Such a part differs in another read of the same sample, such as a time, or is the same in all samples. A part that
    is the same in all samples may belong to the process, such as its number or its device.
    """
    places = [place for place in reads if place in again]
    pairs = [(reads[place], again[place]) for place in places]
    return dict(zip(places, _settled(pairs, in_object=False), strict=True))


def _settled(pairs: list[tuple[Signature, Signature]], *, in_object: bool) -> list[Signature]:
    """Return the first signature of each sample's pair, without the parts that do not belong to the samples."""
    found = [one for one, _ in pairs]
    first: Any = found[0] if found else None
    every: list[Any] = [one for pair in pairs for one in pair]
    if (
        first
        and _has_parts(first)
        and all(type(one) is type(first) and len(one) == len(first) for one in every)
    ):
        in_object = in_object or isinstance(first, Reduced)
        columns = [
            _settled([(one[at], other[at]) for one, other in pairs], in_object=in_object)
            for at in range(len(first))
        ]
        rows = zip(*columns, strict=True)
        return [Reduced(*row) if isinstance(first, Reduced) else type(first)(row) for row in rows]
    is_own = all(alike(*pair) for pair in pairs) and not all(alike(first, one) for one in found)
    return found if is_own or not in_object else [None] * len(found)


def is_vague(signatures: Mapping[Place, Signature]) -> bool:
    """Return whether signatures may look the same only because a part could not be described."""
    found = list(signatures.values())
    return any(map(_lacks_parts, found)) and all(alike(found[0], one) for one in found)


def _has_parts(signature: Signature) -> bool:
    return isinstance(signature, list | tuple) and not isinstance(signature, Numbers)


def _lacks_parts(signature: Signature) -> bool:
    return signature is None or (_has_parts(signature) and any(map(_lacks_parts, signature)))


def alike(one: Signature, other: Signature) -> bool:
    """Return whether two signatures may be those of the same sample."""
    if one is None or other is None:
        return True
    if isinstance(one, Numbers) and isinstance(other, Numbers):
        bound = max(one.tolerance, other.tolerance)
        pairs = zip(one.values, other.values, strict=True)
        are_near = (a == b or abs(a - b) <= bound or (a != a and b != b) for a, b in pairs)
        return one.shape == other.shape and all(are_near)
    if isinstance(one, list | tuple) and type(one) is type(other):
        pair = cast("Sequence[Any]", one), cast("Sequence[Any]", other)
        return len(pair[0]) == len(pair[1]) and all(map(alike, *pair))
    return type(one) is type(other) and one == other


def _of_array(array: Any) -> Signature:
    if array.dtype.kind not in "fc" and not (array.dtype == np.uint8 and array.size > _NUM_VALUES):
        return [array.shape, array.dtype.str, crc32(array.tobytes())]
    flat = array.ravel()
    chosen = [complex(value) for value in _some(flat)]
    largest = max((abs(value) for value in chosen if abs(value) < float("inf")), default=0.0)
    tolerance = _OF_BYTES if array.dtype == np.uint8 else _RELATIVE * largest
    return Numbers(tuple(array.shape), tuple(chosen), float(tolerance))


def spaced(size: int, count: int) -> list[int]:
    """Return at most `count` evenly spaced indices below `size`, with the first and the last."""
    if size <= count:
        return list(range(size))
    return [round(number * (size - 1) / (count - 1)) for number in range(count)]


def _some(values: Sequence[Any]) -> list[Any]:
    return [values[index] for index in spaced(len(values), _NUM_VALUES)]
