"""Copy a model and its inputs to the meta device: every shape, no data."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain_dispatch.model.model_layout import ModelLayout

AnyObject = TypeVar("AnyObject")


def meta_copy(layout: ModelLayout, inputs: AnyObject) -> tuple[nn.Module, AnyObject]:
    """Return a deep copy of a model and of its inputs with all tensors on the meta device.

    A tensor that occurs several times is one object in the copy too. No data is copied, and the arguments stay
    unchanged.

    Args:
        layout: The layout of the model, with the dtypes that the copy gets.
        inputs: Any object; tensors in its attributes and containers are copied the same way.

    Raises:
        TypeError: Some object in the model or in the inputs cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, tensor in layout.tensors.items():
        if id(tensor) not in memo:
            empty = _empty(tensor, layout.dtypes[name])
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
    with _Emptying():
        return copy.deepcopy((layout.model, inputs), memo)


class _Emptying(TorchFunctionMode):
    """A mode under which `copy.deepcopy` copies tensors to the meta device."""

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
        if func is Tensor.clone:  # nn.Parameter.__deepcopy__ calls it
            return _empty(args[0], args[0].dtype)
        return func(*args, **(kwargs or {}))


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)
