"""The private name of torch that this package uses: a module's dict of parameters, the same in torch 2.9 to 2.15."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import Tensor, nn


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
