"""Weights that are elsewhere: whoever computes with one gets it, also where no module was called for it.

While a parameter is away its class is `AwayParameter`, which torch asks before every operation (the
`__torch_function__` protocol). So a module that uses the weight of another one (a tied head, `nn.LSTM`'s flat list)
meets the weight itself, on the device that computes, and never the one on the host.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import OffloadedError


class Fetcher(Protocol):
    """Who brings weights that are away."""

    def inside(self) -> bool:
        """Whether this thread is in a forward: there an operation computes, elsewhere it looks at what is stored."""
        ...

    def fetched(self, tensors: list[Tensor]) -> AbstractContextManager[None]:
        """Within it the tensors are where they are computed."""
        ...


class AwayParameter(nn.Parameter):
    """A parameter whose weight is elsewhere."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Bring the weights that an operation is about to use."""
        return _compute(func, types, args, kwargs)


class AwayBuffer(Tensor):
    """A buffer whose values are elsewhere."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Bring the values that an operation is about to use."""
        return _compute(func, types, args, kwargs)


def class_away(tensor: Tensor) -> type[Tensor]:
    """The class by which a parameter or buffer is brought when it is used.

    One of another class, a quantised weight for example, keeps it: it has that protocol for itself, and its module
    alone brings it.
    """
    if type(tensor) is nn.Parameter:
        return AwayParameter
    return AwayBuffer if type(tensor) is Tensor else type(tensor)


def set_fetcher(tensor: Tensor, fetcher: Fetcher | None) -> None:
    """Say who brings a tensor that is away; None for nobody any more."""
    if fetcher is None:
        del tensor._fetcher  # type: ignore[attr-defined]
    else:
        tensor._fetcher = fetcher  # type: ignore[attr-defined]


def _compute(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Any:
    given = dict(kwargs or {})
    away = [found for found in _tensors_in((args, given)) if isinstance(found, AwayParameter | AwayBuffer)]
    fetcher = cast("Fetcher | None", away[0].__dict__.get("_fetcher")) if away else None
    # Another thread may have brought them since torch asked: then there is nothing to do.
    if fetcher is not None and fetcher.inside():
        with fetcher.fetched(cast("list[Tensor]", away)):
            return _plainly(func, types, args, given)
    if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        raise OffloadedError(
            "the weights of this model are offloaded: they cannot be moved or converted (to, cuda, half, ...); call "
            "remove_hooks(model) first, or give the dtype when the model is dispatched"
        )
    return _plainly(func, types, args, given)


def _plainly(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What torch does with a parameter: the operation, its results ordinary tensors."""
    return nn.Parameter.__torch_function__(func, tuple(types), args, kwargs)


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in cast("Iterable[object]", value):
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(cast("dict[str, object]", value).values()))
