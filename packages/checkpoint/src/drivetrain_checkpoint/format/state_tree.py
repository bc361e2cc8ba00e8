"""Encode states as tagged JSON and tensors. Decoding gives equal values and types, without running code.

Values of JSON's own types are written as they are. A value of another type is an object with one key that begins with
`$`: `{"$tuple": [1, 2]}`, `{"$float": "nan"}`, `{"$tensor": "optimizer/state/0/exp_avg"}`. A dict is written as
`{"$dict": [[key, value], ...]}` if a key is not a plain string or begins with `$`.
"""

import base64
import math
import pickle
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from drivetrain_checkpoint.errors import CorruptCheckpointError, PickleNotAllowedError, StateError
from drivetrain_checkpoint.format.shards import Leaf, Replicated, is_boxed_shard, is_flat_shard
from drivetrain_weights.safetensors_layout import DTYPE_NAMES
from drivetrain_weights.tensor_box import is_dtensor
from drivetrain_weights.tied_parameters import memory_key

# Nested dicts, lists, tuples and sets of tensors, NumPy arrays and plain values, as `state_dict()` returns them.
StateTree: TypeAlias = Any
# The values that the json module reads and writes.
Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
# Keys and indices from the root to a value.
Path: TypeAlias = tuple[object, ...]

_MAX_DEPTH = 100  # a state that contains itself would otherwise raise a RecursionError without a path
_MAX_INTEGER_BITS = 64  # JSON readers lose digits of longer integers
_HINT = (
    "return tensors and plain values (numbers, strings, bytes, dicts, lists, tuples, sets) from state_dict()"
)
_KEY_TYPES = (str, int, float, bool, type(None), bytes, complex, tuple, frozenset, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A state, split into JSON and the tensors of a tensor file.

    Attributes:
        json: The tagged JSON, which refers to tensors by name.
        tensors: The tensors to store, by name; sharded ones as DTensor, `Replicated` or `FlatShard`. Tensors of
            the same memory share one entry.
        leaves: The same tensors and their aliases, by the path in the state.
    """

    json: Json
    tensors: dict[str, Leaf]
    leaves: dict[str, Leaf]


def encode(state: StateTree, *, root: str, allow_pickle: bool = False) -> Encoded:
    """Split a state into tagged JSON and tensors; tensors are not copied.

    Tensors that are exactly the same memory are stored once and load as one tensor. Tensors that merely overlap are
    each stored in full. Two `FlatShard` objects are the same tensor if they are the same object.

    Args:
        state: Nested dicts, lists, tuples and sets of tensors, DTensors, `Replicated`, `FlatShard`, NumPy arrays
            and plain values.
        root: The name of the state in error messages.
        allow_pickle: Whether to pickle any other value.

    Raises:
        StateError: The state holds a value that cannot be stored; the message names its path and type.
    """
    encoder = _Encoder(root, allow_pickle)
    return Encoded(json=encoder.encode(state, ()), tensors=encoder.tensors, leaves=encoder.leaves)


def decode(json: Json, tensors: Mapping[str, Leaf], *, allow_pickle: bool = False) -> StateTree:
    """Restore the state that `encode` split; tensors are not copied.

    Raises:
        CorruptCheckpointError: The JSON names a missing tensor, or holds a tag that only a newer version knows.
        PickleNotAllowedError: The JSON holds a pickle, and `allow_pickle` is false.
    """

    def find(name: str) -> Leaf:
        if name not in tensors:
            raise CorruptCheckpointError(
                f"the state names the tensor {name!r}, which its tensor file does not hold"
            )
        return tensors[name]

    def to_array(described: Mapping[str, Any]) -> StateTree:
        from drivetrain_checkpoint.format.numpy_values import from_bytes_tensor

        bits = find(described["tensor"])
        return from_bytes_tensor(bits, dtype=described["dtype"], shape=described["shape"])

    decoders = {**_DECODERS, "$tensor": find, "$ndarray": to_array}
    if not allow_pickle:
        decoders["$pickle"] = lambda _: _refuse_pickles(json)

    def restore(json: Json) -> StateTree:
        if isinstance(json, list):
            return [restore(item) for item in json]
        if not isinstance(json, dict):
            return json
        values = {key: restore(value) for key, value in json.items()}
        tag = next(iter(json), "")
        if not tag.startswith("$"):
            return values
        if tag not in decoders:
            raise CorruptCheckpointError(
                f"the state holds {tag!r}, which this version of drivetrain-checkpoint does not know: upgrade it"
            )
        return decoders[tag](values[tag])

    return restore(json)


def _refuse_pickles(json: Json, path: str = "") -> None:
    if isinstance(json, dict):
        if "$pickle" in json:
            raise PickleNotAllowedError(
                f"{path.removeprefix('/') or 'the state'} is a pickle: to load it runs code of whoever saved it; if "
                "you trust them, allow it with checkpoint.allow_pickle=True"
            )
        for key, value in json.items():
            _refuse_pickles(value, path if key.startswith("$") else f"{path}/{key}")
    elif isinstance(json, list):
        for value in json:
            _refuse_pickles(value, path)


@dataclass(slots=True)
class _Encoder:
    root: str
    allow_pickle: bool
    tensors: dict[str, Leaf] = field(default_factory=dict[str, Leaf])
    leaves: dict[str, Leaf] = field(default_factory=dict[str, Leaf])
    _names: dict[object, str] = field(default_factory=dict[object, str])

    def encode(self, value: StateTree, path: Path) -> Json:
        if len(path) > _MAX_DEPTH:
            raise self._refusal(path, f"it is nested more than {_MAX_DEPTH} levels deep, or holds itself")
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if value.bit_length() < _MAX_INTEGER_BITS else {"$int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if type(value) is list:
            return self.items(value, path)
        if type(value) is dict:
            return self.mapping(value, path)
        if type(value) in _KINDS:
            tag, encode_value, _ = _KINDS[type(value)]
            return {tag: encode_value(self, value, path)}
        if isinstance(value, (Tensor, Replicated)) or is_flat_shard(value) or is_boxed_shard(value):
            return {"$tensor": self.name_of(value, path)}
        if (numpy := sys.modules.get("numpy")) is not None:
            if type(value) is numpy.ndarray:
                name = self.name_of(self._numpy_bytes(value, path), path)
                return {"$ndarray": {"dtype": value.dtype.str, "shape": list(value.shape), "tensor": name}}
            if isinstance(value, numpy.generic):
                data = base64.b64encode(bytes(self._numpy_bytes(value, path).tolist())).decode()
                return {"$numpy_scalar": {"dtype": value.dtype.str, "data": data}}
        return self._pickle(value, path)

    def items(self, values: Iterable[StateTree], path: Path) -> list[Json]:
        return [self.encode(value, (*path, index)) for index, value in enumerate(values)]

    def pairs(self, values: Mapping[StateTree, StateTree], path: Path) -> list[Json]:
        for key in values:
            if type(key) not in _KEY_TYPES and not type(key).__module__ == "numpy":
                raise self._refusal(path, f"its key {key!r} is a {_type_name(key)}; {_HINT}, with plain keys")
        return [[self.encode(key, path), self.encode(value, (*path, key))] for key, value in values.items()]

    def mapping(self, values: Mapping[StateTree, StateTree], path: Path) -> Json:
        if all(type(key) is str and not key.startswith("$") for key in values):
            return {key: self.encode(value, (*path, key)) for key, value in values.items()}
        return {"$dict": self.pairs(values, path)}

    def name_of(self, leaf: Leaf, path: Path) -> str:
        """Record a tensor and return its stored name. A tensor of the same memory as an earlier one has that name."""
        tensor = (
            leaf.tensor if isinstance(leaf, Replicated) else leaf.to_local() if is_dtensor(leaf) else leaf
        )
        if isinstance(tensor, Tensor):
            self._check_tensor(tensor, path)
        elif tensor.dtype not in DTYPE_NAMES:
            raise self._refusal(path, f"safetensors has no {tensor.dtype}; convert it")
        wanted = name = "/".join(map(str, path)) or "value"
        number = 0
        while name in self.leaves or name == "__metadata__":  # a name that safetensors reserves
            number += 1
            name = f"{wanted}#{number}"
        self.leaves[name] = leaf
        stored_as = self._names.setdefault(_memory_of(leaf), name)
        if stored_as == name:
            self.tensors[name] = leaf
        return stored_as

    def _check_tensor(self, tensor: Tensor, path: Path) -> None:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise self._refusal(
                path,
                f"it is a {_type_name(tensor)}; give plain tensors or DTensors: its dequantized or plain form",
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise self._refusal(
                path, f"it is a tensor of layout {tensor.layout}, {tensor.dtype}; store its parts"
            )
        if tensor.is_meta:
            raise self._refusal(path, "it is on the meta device and has no data; materialise it first")
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise self._refusal(path, "its memory was freed, as by storage().resize_(0); gather it first")
        if tensor.dtype not in DTYPE_NAMES:
            raise self._refusal(
                path, f"safetensors has no {tensor.dtype}; convert it, with torch.view_as_real() for instance"
            )

    def _numpy_bytes(self, value: StateTree, path: Path) -> Tensor:
        from drivetrain_checkpoint.format.numpy_values import as_bytes_tensor, is_plain

        if not is_plain(value.dtype):
            raise self._refusal(path, f"it is a NumPy value of dtype {value.dtype}; {_HINT}")
        return as_bytes_tensor(value)

    def _pickle(self, value: StateTree, path: Path) -> Json:
        if not self.allow_pickle:
            raise self._refusal(
                path,
                f"it is a {_type_name(value)}, which a checkpoint cannot hold without running code at load; {_HINT}",
            )
        try:
            return {"$pickle": base64.b64encode(pickle.dumps(value)).decode()}
        except Exception as error:
            raise self._refusal(
                path, f"it is a {_type_name(value)}, which cannot be pickled: {error}"
            ) from error

    def _refusal(self, path: Path, why: str) -> StateError:
        return StateError(f"{self.root}{''.join(f'[{key!r}]' for key in path)}: {why}")


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _memory_of(leaf: Leaf) -> object:
    """Return a key that is equal for tensors of the same memory; the id of an object without memory on this rank."""
    if isinstance(leaf, Replicated):
        return _memory_of(leaf.tensor)
    if is_flat_shard(leaf) or is_boxed_shard(leaf):
        return id(leaf)
    tensor: Tensor = leaf.to_local() if is_dtensor(leaf) else leaf
    return (leaf.shape, memory_key(tensor)) if tensor.numel() else id(leaf)


def _to_text(_: _Encoder, value: bytes | bytearray, __: Path) -> Json:
    return base64.b64encode(value).decode()


def _to_sorted(encoder: _Encoder, value: Iterable[StateTree], path: Path) -> Json:
    return encoder.items(sorted(value, key=repr), path)


def _to_dtype(name: object) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"the state names the dtype {name!r}, which this torch does not have")
    return dtype


def _to_numpy_scalar(described: Mapping[str, Any]) -> StateTree:
    from drivetrain_checkpoint.format.numpy_values import from_bytes_tensor

    bits = torch.frombuffer(bytearray(base64.b64decode(described["data"])), dtype=torch.uint8)
    return from_bytes_tensor(bits, dtype=described["dtype"], shape=[])[()]


# For each type that JSON lacks: the tag, what encodes a value under it, and what restores it from restored values.
_KINDS: dict[type, tuple[str, Callable[[_Encoder, Any, Path], Json], Callable[[Any], StateTree]]] = {
    complex: ("$complex", lambda e, v, path: e.items((v.real, v.imag), path), lambda parts: complex(*parts)),
    bytes: ("$bytes", _to_text, base64.b64decode),
    bytearray: ("$bytearray", _to_text, lambda text: bytearray(base64.b64decode(text))),
    tuple: ("$tuple", _Encoder.items, tuple),
    set: ("$set", _to_sorted, set),
    frozenset: ("$frozenset", _to_sorted, frozenset),
    deque: ("$deque", lambda e, v, path: [e.items(v, path), v.maxlen], lambda json: deque(json[0], json[1])),
    OrderedDict: ("$ordered_dict", _Encoder.pairs, OrderedDict),
    Counter: ("$counter", _Encoder.pairs, lambda pairs: Counter(dict(pairs))),
    torch.Size: ("$size", lambda _, v, __: list(v), torch.Size),
    torch.dtype: ("$dtype", lambda _, v, __: str(v).removeprefix("torch."), _to_dtype),
    torch.device: ("$device", lambda _, v, __: str(v), torch.device),
}
# The values of these tags are encoded by methods of `_Encoder`.
_DECODERS: dict[str, Callable[[Any], StateTree]] = {
    "$int": lambda text: int(text, 16),
    "$float": float,
    "$dict": dict,
    "$numpy_scalar": _to_numpy_scalar,
    # Runs code: `decode` refuses it unless allowed.
    "$pickle": lambda text: pickle.loads(base64.b64decode(text)),
    **{tag: restore for tag, _, restore in _KINDS.values()},
}
