"""Describe a sample in a few plain values, by which ranks tell whether they have read the same one."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias, cast
from zlib import crc32

import numpy as np
import torch

Signature: TypeAlias = Any

_NUM_VALUES = 64
# Machines differ in the last bits of what they compute, and in the lowest bit or two of an image that they decode.
_RELATIVE, _OF_BYTES = 1e-4, 4


class Numbers(NamedTuple):
    """Some of an array's numbers, evenly spaced.

    Attributes:
        shape: The shape of the array.
        values: The numbers themselves, as complex ones.
        tolerance: The largest difference between numbers that count as the same.
    """

    shape: tuple[int, ...]
    values: tuple[complex, ...]
    tolerance: float


def signature_of(sample: Any) -> Signature:
    """Return the signature of a sample of any kind; what cannot be compared is described by its type alone."""
    if isinstance(sample, torch.Tensor):
        return _of_tensor(sample)
    if isinstance(sample, np.ndarray | np.generic | float | complex):
        return _of_array(np.asarray(sample))
    if isinstance(sample, str):  # nodes may keep copies of a file in folders of their own
        return os.path.basename(sample) if os.path.isabs(sample) else crc32(sample.encode(errors="replace"))
    if sample is None or isinstance(sample, int):
        return sample
    if isinstance(sample, bytes):
        return crc32(sample)
    if isinstance(sample, Mapping):
        items = cast("Mapping[Any, Any]", sample).items()
        return (
            sorted((repr(key), signature_of(value)) for key, value in items)
            if len(items) < 1000
            else len(items)
        )
    if isinstance(sample, list | tuple):
        return [len(cast("Sequence[Any]", sample)), *map(signature_of, _some(cast("Sequence[Any]", sample)))]
    if hasattr(sample, "tobytes"):  # an image
        return _of_array(np.frombuffer(sample.tobytes(), dtype=np.uint8))
    if is_dataclass(sample) and not isinstance(sample, type):
        return [signature_of(getattr(sample, field.name)) for field in fields(sample)]
    return type(sample).__name__


def alike(one: Signature, other: Signature) -> bool:
    """Return whether two signatures are those of the same sample."""
    if isinstance(one, Numbers) and isinstance(other, Numbers):
        bound = max(one.tolerance, other.tolerance)
        pairs = zip(one.values, other.values, strict=True)
        return one.shape == other.shape and all(_near(a, b, bound) for a, b in pairs)
    if isinstance(one, list | tuple) and type(one) is type(other):
        pair = cast("Sequence[Any]", one), cast("Sequence[Any]", other)
        return len(pair[0]) == len(pair[1]) and all(map(alike, *pair))
    return type(one) is type(other) and one == other


def _near(one: complex, other: complex, bound: float) -> bool:
    return one == other or abs(one - other) <= bound or (one != one and other != other)


def _of_tensor(tensor: torch.Tensor) -> Signature:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return f"{tensor.layout} {tensor.dtype}"
    flat = tensor.detach()
    if flat.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        flat = flat.float()
    return _of_array(flat.cpu().numpy())


def _of_array(array: Any) -> Signature:
    if array.dtype.kind not in "fc" and not (array.dtype == np.uint8 and array.size > _NUM_VALUES):
        content = (
            repr(array.ravel()[:_NUM_VALUES].tolist()).encode() if array.dtype.hasobject else array.tobytes()
        )
        return [array.shape, array.dtype.str, crc32(content)]
    flat = array.ravel()
    chosen = [complex(value) for value in _some(flat)]
    largest = max((abs(value) for value in chosen if abs(value) < float("inf")), default=0.0)
    tolerance = _OF_BYTES if array.dtype == np.uint8 else _RELATIVE * largest
    return Numbers(tuple(array.shape), tuple(chosen), float(tolerance))


def _some(values: Sequence[Any]) -> list[Any]:
    """Return at most `_NUM_VALUES` values, evenly spaced, with the first and the last."""
    last = len(values) - 1
    if last < _NUM_VALUES:
        return list(values)
    return [values[round(number * last / (_NUM_VALUES - 1))] for number in range(_NUM_VALUES)]
