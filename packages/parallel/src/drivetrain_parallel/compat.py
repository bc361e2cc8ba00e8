"""The private names of torch that this package uses, the same in torch 2.9 to 2.15."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch.autograd.function import once_differentiable as _once_differentiable
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_map_only as tree_map_only  # for arguments of any nesting

T = TypeVar("T", bound=Tensor)
Backward = TypeVar("Backward", bound=Callable[..., Any])
unseen_by_modes = _disable_current_modes  # a context or decorator: modes see none of its operations


@contextmanager
def exchanged_parameters(
    module: nn.Module, exchange: Callable[[Tensor], Tensor], *, with_buffers: bool = False
) -> Generator[None]:
    """Have a module's own parameters read as other tensors, which need be none of `nn.Parameter`.

    A forward reads them through the module's dict of parameters, which only takes parameters from outside.
    """
    names = ("_parameters", "_buffers") if with_buffers else ("_parameters",)
    own: dict[str, dict[str, Tensor | None]] = {name: vars(module)[name] for name in names}
    for name, held in own.items():
        vars(module)[name] = {key: one if one is None else exchange(one) for key, one in held.items()}
    try:
        yield
    finally:
        vars(module).update(own)


def shared_attributes(module: nn.Module) -> dict[int, Any]:
    """Return the memo by which `deepcopy` copies modules and tensors alone, and shares what else modules hold.

    A configuration that is copied may be another: transformers' forgets which attention it was given. Dicts are
    copied by themselves: hooks that the module gets later are none of the copy's.
    """
    held = ((key, value) for one in module.modules() for key, value in vars(one).items())
    others = (value for key, value in held if key not in ("_parameters", "_buffers", "_modules"))
    return {id(value): value.copy() if isinstance(value, dict) else value for value in others}


def make_wrapper(
    kind: type[T],
    part: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    device: torch.device | None = None,
) -> T:
    """Return a tensor of a subclass without values of its own, of the dtype and by default the device of `part`."""
    make: Any = kind._make_wrapper_subclass  # pyright: ignore[reportPrivateUsage]
    return make(kind, shape, strides=strides, dtype=part.dtype, device=device or part.device)


def changes_in_place(operator: Any) -> bool:
    """Return whether an operator of torch changes one of its arguments."""
    return bool(operator._schema.is_mutable)


def changes_shape_in_place(operator: Any) -> bool:
    """Return whether an operator of torch changes the shape or strides of one of its arguments, as `t_` does."""
    return torch.Tag.inplace_view in operator.tags


def once_differentiable(backward: Backward) -> Backward:
    """Have a backward refuse gradients of gradients; torch's own decorator has types that classes do not take."""
    return _once_differentiable(backward)  # type: ignore[arg-type, return-value]
