"""Copies that have every shape and no data: of a model, of its inputs, of anything that holds tensors."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain_dispatch.model.sizes import dtype_after, named_tensors

AnyObject = TypeVar("AnyObject")


def meta_copy(
    model: nn.Module,
    inputs: AnyObject,
    *,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
) -> tuple[nn.Module, AnyObject]:
    """A deep copy of a model and of what it is called with, all tensors of it on the meta device.

    What shares memory by being one object shares it in the copy too. No data is copied, and what is given stays as
    it is.

    Args:
        model: The model.
        inputs: Any object; tensors in it, in attributes and containers, are copied the same way.
        dtype: What the model's floating-point and complex tensors are converted to; None takes them as they are.
        special_dtypes: Dtypes of single tensors of the model by name, which win over `dtype`.

    Raises:
        TypeError: Something in the model or in the inputs cannot be copied.
    """
    special = special_dtypes or {}
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(model):
        if id(tensor) not in memo:
            empty = _empty(tensor, dtype_after(tensor, dtype, special.get(name)))
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
    with _Emptying():
        return copy.deepcopy((model, inputs), memo)


class _Emptying(TorchFunctionMode):
    """Within it, what `copy.deepcopy` asks of a tensor gives one on the meta device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = _empty(tensor, tensor.dtype)
            return memo[id(tensor)]
        if func is Tensor.clone:  # how a parameter copies itself
            return _empty(args[0], args[0].dtype)
        return func(*args, **(kwargs or {}))


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)
