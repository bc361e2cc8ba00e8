"""The functions of torch that treat each row alone, so that ranks compute them on their own rows or columns.

They are known by name, and by what their other arguments are. Anything else is given the whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from drivetrain_parallel.outputs.layout import PartLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCall:
    """A call of a function with parts, of which `parts` are some of `args`, in place of divided tensors."""

    layout: PartLayout
    parts: tuple[Tensor, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def is_by_row(name: str, call: RowCall) -> bool:
    """Return whether a function computes each row alone of what the call gives it."""
    is_known = _BY_ROW.get(name)
    return is_known is not None and "out" not in call.kwargs and is_known(call)


def _is_of_elements(call: RowCall) -> bool:
    is_of_first = len(call.parts) == 1 and call.parts[0] is call.args[0]
    return is_of_first and not call.kwargs.get("inplace")


def _is_of_operands(call: RowCall) -> bool:
    """Return whether each operand is a part, or a number or vector that all ranks hold alike.

    The gradient of a vector is averaged by ranks with other rows; those with other columns would have to add it up.
    """
    is_whole, parts = call.layout.has_whole_rows, set(map(id, call.parts))
    return not any(isinstance(one, Tensor) for one in call.kwargs.values()) and all(
        isinstance(one, (int, float))
        or id(one) in parts
        or (isinstance(one, Tensor) and one.dim() <= is_whole and (is_whole or not one.requires_grad))
        for one in call.args
    )


def _is_of_whole_rows(call: RowCall) -> bool:
    return call.layout.has_whole_rows and _is_of_elements(call)


def _is_over_columns(call: RowCall) -> bool:
    dim = call.args[1:] or (call.kwargs.get("dim"),)
    return (
        _is_of_whole_rows(call) and dim in ((-1,), ([-1],), ((-1,),)) and call.kwargs.get("keepdim") is True
    )


def _is_norm(call: RowCall) -> bool:
    return _is_of_whole_rows(call) and len(call.args) > 1 and len(call.args[1]) == 1


_ELEMENTS = (
    "to", "float", "double", "half", "bfloat16", "clone", "neg", "abs", "exp", "sqrt", "rsqrt", "tanh", "sigmoid",
    "relu", "silu", "gelu",
)  # fmt: skip
_OPERANDS = ("add", "sub", "mul", "div", "pow", "__rsub__", "__rdiv__", "__rpow__")
_BY_ROW: Mapping[str, Callable[[RowCall], bool]] = MappingProxyType(
    {
        **dict.fromkeys(_ELEMENTS, _is_of_elements),
        **dict.fromkeys(_OPERANDS, _is_of_operands),
        **dict.fromkeys(("sum", "mean", "var"), _is_over_columns),
        **dict.fromkeys(("layer_norm", "rms_norm"), _is_norm),
        "linear": _is_of_whole_rows,
    }
)


def rows_seen(
    name: str, layout: PartLayout, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the rows of what a view, a copy or an index is of; None if it is none that leaves rows as they are."""
    if name == "contiguous" and not (args or kwargs):
        return layout.dense_rows
    if name == "flatten":
        return _flattened(layout.rows, *args, **kwargs)
    if name == "__getitem__":
        return _indexed(layout.rows, args[0] if isinstance(args[0], tuple) else args)
    if name in ("view", "reshape") and args and not kwargs:
        sizes: Sequence[Any] = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        return _reshaped(layout, name, sizes)
    return None


def _flattened(rows: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor | None:
    dim = rows.dim() + 1
    start, end = start_dim % dim, end_dim % dim
    if end < dim - 1:
        return rows.flatten(start, end)
    return rows if start == end else None


def _reshaped(layout: PartLayout, name: str, sizes: Sequence[Any]) -> Tensor | None:
    if not sizes or any(type(size) is not int for size in sizes):
        return None
    *outer, last = sizes
    is_rest = last == -1 and prod(outer) == layout.rows.numel()
    return getattr(layout.rows, name)(outer) if is_rest or last == sum(layout.sizes) else None  # type: ignore[no-any-return]


def _indexed(rows: Tensor, items: tuple[Any, ...]) -> Tensor | None:
    """Return the rows of an index of a tensor that takes its last dimension in full."""
    num_indexed, is_known = 0, True
    for item in items:
        if type(item) is Tensor and item.dtype in (torch.bool, torch.int64):
            num_indexed += item.dim() if item.dtype is torch.bool else 1
        elif type(item) in (int, slice):
            num_indexed += 1
        else:
            is_known = is_known and (item is None or item is Ellipsis)
    if not is_known or num_indexed > rows.dim() + 1:
        return None
    if items and isinstance(items[-1], slice) and items[-1] == slice(None):
        return rows[items[:-1]]
    ends_early = bool(items) and (items[-1] is Ellipsis or not any(item is Ellipsis for item in items))
    return rows[items] if ends_early and num_indexed <= rows.dim() else None
