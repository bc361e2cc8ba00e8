"""Fetch an offloaded weight for any operation that uses it, even if its own module is not called.

The class of an offloaded parameter is `AwayParameter`, which torch calls before every operation (the
`__torch_function__` protocol). In a forward, a module that uses the weight of another one (a tied head, `nn.LSTM`'s
flat list) computes with the fetched weight, on the device that computes. Elsewhere, it is the stored tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast
from weakref import ref

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import OffloadedError

# The attributes and methods of a tensor that need none of its values.
_ASKED = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "ndim",
        "requires_grad",
        "grad",
        "is_leaf",
        "layout",
        "grad_fn",
        "_version",
    )
) | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.requires_grad_,
}
_SET_DATA = getattr(Tensor, "data").__set__  # noqa: B009 a descriptor, which types do not know
CANNOT_BE_CHANGED = (
    "the weights of this model are offloaded: they cannot be replaced, moved or converted (.data = ..., to, cuda, "
    "half, ...); call remove_hooks(model) first, or give the dtype when the model is dispatched"
)


class Fetcher(Protocol):
    """The interface of an engine that fetches offloaded weights."""

    def inside(self) -> bool:
        """Return whether this thread is in a forward, where operations use fetched weights, not stored ones."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors to compute with in place of offloaded ones."""
        ...

    def stays(self, tensor: Tensor) -> bool:
        """Return whether the device that stores a tensor also computes with it."""
        ...

    def let_go(self, tensors: Sequence[Tensor], result: object) -> None:
        """Release fetched tensors after an operation; its result may be a view of one."""
        ...


def _bring_what_is_used(
    _cls: type,
    func: Callable[..., Any],
    _types: Iterable[type],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run an operation as `__torch_function__`: in a forward, with fetched weights for offloaded ones."""
    given = kwargs or {}
    if func in _ASKED:
        return plainly(func, *args, **given)
    if func == _SET_DATA:
        fetcher = _fetcher_of(args[0])
        if fetcher is not None and _is_what_it_is(args[0], args[1], fetcher):
            return None
        raise OffloadedError(CANNOT_BE_CHANGED)
    fetchers = _fetchers_of((args, given))
    if not fetchers:
        return plainly(func, *args, **given)
    replaced: dict[int, Tensor] = {}
    result: Any = None
    taken: list[tuple[Fetcher, list[Tensor]]] = []
    try:
        for fetcher, tensors in fetchers.items():
            shown = fetcher.fetch(tensors)
            taken.append((fetcher, tensors))
            replaced.update(zip(map(id, tensors), shown, strict=True))
        result = plainly(func, *_replace(args, replaced), **_replace(given, replaced))
    finally:
        for fetcher, tensors in taken:
            fetcher.let_go(tensors, result)
    return result


def _is_what_it_is(tensor: Tensor, value: Tensor, fetcher: Fetcher) -> bool:
    """Return whether a value assigned to `.data` is the tensor's own data; in a forward, that of its fetched copy."""
    if value is tensor:
        return fetcher.stays(tensor)  # if False, the same call would move weights off the other device
    if not fetcher.inside():
        return False
    (shown,) = fetcher.fetch([tensor])
    fetcher.let_go([tensor], None)
    same_kind = (value.dtype, value.shape, value.stride()) == (shown.dtype, shown.shape, shown.stride())
    return same_kind and value.data_ptr() == shown.data_ptr()


class AwayParameter(nn.Parameter):
    """A parameter whose weight is offloaded."""

    __torch_function__ = classmethod(_bring_what_is_used)  # type: ignore[assignment] torch leaves it untyped

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter with a copy of the stored values."""
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the stored values as an ordinary parameter."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class AwayBuffer(Tensor):
    """A buffer whose values are offloaded."""

    __torch_function__ = classmethod(_bring_what_is_used)  # type: ignore[assignment] torch leaves it untyped


def class_away(tensor: Tensor) -> type[Tensor]:
    """Return the class by which a parameter or buffer is fetched when it is used.

    A tensor of another class, such as a quantised weight, keeps its class: it uses that protocol itself, and only its
    module fetches it.
    """
    if type(tensor) is nn.Parameter:
        return AwayParameter
    return AwayBuffer if type(tensor) is Tensor else type(tensor)


def is_away(tensor: Tensor) -> bool:
    """Return whether a tensor is an offloaded one of a dispatched model."""
    return isinstance(tensor, AwayParameter | AwayBuffer)


def kind_in_use(tensor: Tensor) -> tuple[torch.dtype, torch.device] | None:
    """Return the dtype and device of an offloaded tensor: the fetched one's in a forward, else the stored one's.

    None outside a forward if one device stores the tensor and another computes with it.
    """
    fetcher = _fetcher_of(tensor)
    if fetcher is None:
        return None
    if fetcher.inside():
        (shown,) = fetcher.fetch([tensor])
        fetcher.let_go([tensor], None)
        return shown.dtype, shown.device
    return (tensor.dtype, tensor.device) if fetcher.stays(tensor) else None


def set_fetcher(tensor: Tensor, fetcher: Fetcher | None) -> None:
    """Set the engine that fetches an offloaded tensor, by a weak reference; None removes it."""
    if fetcher is None:
        del tensor._fetcher  # type: ignore[attr-defined]
    else:
        tensor._fetcher = ref(fetcher)  # type: ignore[attr-defined]


def _fetcher_of(tensor: Tensor) -> Fetcher | None:
    found = cast("ref[Fetcher] | None", tensor.__dict__.get("_fetcher"))
    return None if found is None else found()


def _fetchers_of(value: object) -> dict[Fetcher, list[Tensor]]:
    """Return the distinct offloaded tensors among arguments, by the engine whose forward this thread is in."""
    found: dict[Fetcher, dict[int, Tensor]] = {}
    for tensor in _tensors_in(value):
        if is_away(tensor):
            fetcher = _fetcher_of(tensor)
            if fetcher is not None and fetcher.inside():
                found.setdefault(fetcher, {})[id(tensor)] = tensor
    return {fetcher: list(tensors.values()) for fetcher, tensors in found.items()}


def plainly(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with the stored tensors; its results are ordinary tensors."""
    return nn.Parameter.__torch_function__(func, (), args, kwargs)


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in cast("Iterable[object]", value):
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(cast("dict[str, object]", value).values()))


def _replace(value: Any, replaced: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(_replace(item, replaced) for item in value)
    if type(value) is dict:
        return {key: _replace(item, replaced) for key, item in cast("dict[str, Any]", value).items()}
    return value
