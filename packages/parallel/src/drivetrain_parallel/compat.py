"""The private names of torch that this package uses, the same in torch 2.9 to 2.15."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch.utils._pytree import tree_map_only as tree_map_only  # for arguments of any nesting

T = TypeVar("T", bound=Tensor)


@contextmanager
def exchanged_parameters(module: nn.Module, exchange: Callable[[Tensor], Tensor]) -> Generator[None]:
    """Have a module's own parameters read as other tensors, which need be none of `nn.Parameter`.

    A forward reads them through the module's dict of parameters, which only takes parameters from outside.
    """
    own = module._parameters  # pyright: ignore[reportPrivateUsage]
    read = {name: p if p is None else exchange(p) for name, p in own.items()}
    module._parameters = read  # type: ignore[assignment]  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        module._parameters = own  # pyright: ignore[reportPrivateUsage]


def make_wrapper(kind: type[T], part: Tensor, size: int) -> T:
    """Return a tensor of a subclass without values of its own, shaped as `part` with a last dimension of `size`."""
    *outer, inner = part.shape
    strides = [stride // inner * size for stride in part.stride()[:-1]]
    make: Any = kind._make_wrapper_subclass  # pyright: ignore[reportPrivateUsage]
    return make(kind, (*outer, size), strides=(*strides, 1), dtype=part.dtype, device=part.device)


def changes_in_place(operator: Any) -> bool:
    """Return whether an operator of torch changes one of its arguments."""
    return bool(operator._schema.is_mutable)
