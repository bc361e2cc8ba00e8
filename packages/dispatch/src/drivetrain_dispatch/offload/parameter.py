"""Fetch an offloaded weight for any operation that uses it, even without a call of the weight's module.

An offloaded parameter is an `OffloadedParameter`, which torch calls before every operation (`__torch_function__`). In
a forward, another module (a tied head, `nn.LSTM`'s flat list) computes with the fetched weight, on the computing
device. Outside a forward, operations use the stored tensor.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol, cast
from weakref import ref

import torch
from torch import Tensor, nn

from drivetrain_dispatch.compat import APPLY, READ_VERSION, Args, Kwargs, Types
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.model.model_layout import ModelLayout, enclosing_modules
from drivetrain_dispatch.model.nested_values import map_tensors, tensors_in
from drivetrain_dispatch.offload.forward_hooks import MethodWrapper

# The attributes and methods of a tensor that need none of its values.
_METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "ndim", "requires_grad", "grad", "is_leaf", "layout", "grad_fn")
) | {
    READ_VERSION,
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


class TensorFetcher(Protocol):
    """The interface by which single operations get offloaded tensors from the engine."""

    def is_computing(self) -> bool:
        """Return whether this thread is in a forward, where operations use fetched tensors, not stored ones."""
        ...

    def acquire(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors to compute with in place of offloaded ones."""
        ...

    def release(self, tensors: Sequence[Tensor], result: object) -> None:
        """Release tensors after an operation; `result` may be a view of a released tensor."""

    def keeps_device(self, tensor: Tensor) -> bool:
        """Return whether the device that stores a tensor also computes with it."""
        ...


def _compute_with_fetched(
    _cls: type, func: Any, _types: Types, args: Args = (), kwargs: Kwargs = None
) -> Any:
    """Run an operation as `__torch_function__`: in a forward, with fetched tensors for offloaded ones."""
    given = kwargs or {}
    if func in _METADATA:
        return call_plainly(func, *args, **given)
    if func == _SET_DATA:
        fetcher = _fetcher_of(args[0])
        if fetcher is not None and _is_own_data(args[0], args[1], fetcher):
            return None
        raise OffloadedError(CANNOT_BE_CHANGED)
    replaced: dict[int, Tensor] = {}
    result: Any = None
    acquired: list[tuple[TensorFetcher, list[Tensor]]] = []
    try:
        # By the engine whose forward this thread is in.
        offloaded: dict[TensorFetcher, dict[int, Tensor]] = {}
        for tensor in tensors_in((args, given)):
            if (
                is_offloaded(tensor)
                and (fetcher := _fetcher_of(tensor)) is not None
                and fetcher.is_computing()
            ):
                offloaded.setdefault(fetcher, {})[id(tensor)] = tensor
        for fetcher, distinct in offloaded.items():
            tensors = list(distinct.values())
            fetched = fetcher.acquire(tensors)
            acquired.append((fetcher, tensors))
            replaced.update(zip(map(id, tensors), fetched, strict=True))
        if replaced:
            args, given = map_tensors((args, given), lambda tensor: replaced.get(id(tensor), tensor))
        result = call_plainly(func, *args, **given)
    finally:
        for fetcher, tensors in acquired:
            fetcher.release(tensors, result)
    return result


def _is_own_data(tensor: Tensor, value: Tensor, fetcher: TensorFetcher) -> bool:
    """Return whether a value assigned to `.data` is the data of the tensor; in a forward, of its fetched copy."""
    if value is tensor:
        return fetcher.keeps_device(tensor)  # if False, the same call would move weights off the other device
    if not fetcher.is_computing():
        return False
    fetched = _fetched(tensor, fetcher)
    same_kind = (value.dtype, value.shape, value.stride()) == (fetched.dtype, fetched.shape, fetched.stride())
    return same_kind and value.data_ptr() == fetched.data_ptr()


def _fetched(tensor: Tensor, fetcher: TensorFetcher) -> Tensor:
    """Return the fetched values of a tensor, for reading their metadata only."""
    (fetched,) = fetcher.acquire([tensor])
    fetcher.release([tensor], None)
    return fetched


class OffloadedParameter(nn.Parameter):
    """A parameter whose weight is offloaded."""

    __torch_function__ = classmethod(_compute_with_fetched)  # type: ignore[assignment] torch leaves it untyped

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter with a copy of the stored values."""
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the stored values as an ordinary parameter."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class OffloadedBuffer(Tensor):
    """A buffer whose values are offloaded."""

    __torch_function__ = classmethod(_compute_with_fetched)  # type: ignore[assignment] torch leaves it untyped


# A tensor of another class, such as a DTensor, keeps it: only its module fetches it.
_OFFLOADED: dict[type[Tensor], type[Tensor]] = {nn.Parameter: OffloadedParameter, Tensor: OffloadedBuffer}
_ORDINARY = {offloaded: ordinary for ordinary, offloaded in _OFFLOADED.items()}


def mark_offloaded(tensor: Tensor, fetcher: TensorFetcher) -> None:
    """Turn a parameter or buffer into an offloaded one, with a weak reference to the engine that fetches it."""
    tensor._fetcher = ref(fetcher)  # type: ignore[attr-defined]
    tensor.__class__ = _OFFLOADED.get(type(tensor), type(tensor))  # type: ignore[assignment]


def make_ordinary(tensor: Tensor) -> None:
    """Turn an offloaded tensor into an ordinary one again, with its stored values."""
    tensor.__class__ = _ORDINARY.get(type(tensor), type(tensor))  # type: ignore[assignment]
    del tensor._fetcher  # type: ignore[attr-defined]


def is_offloaded(tensor: Tensor) -> bool:
    """Return whether a tensor is an offloaded tensor of a dispatched model."""
    return isinstance(tensor, OffloadedParameter | OffloadedBuffer)


def _fetcher_of(tensor: Tensor) -> TensorFetcher | None:
    found = cast("ref[TensorFetcher] | None", tensor.__dict__.get("_fetcher"))
    return None if found is None else found()


def call_plainly(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with the stored tensors; its results are ordinary tensors."""
    return nn.Parameter.__torch_function__(func, (), args, kwargs)


def keep_in_place(layout: ModelLayout, offloaded: Collection[str]) -> list[MethodWrapper]:
    """Make moves and conversions of modules with offloaded tensors fail until the returned wrappers are removed."""
    # Calls that leave every weight unchanged go through, such as `model.cpu()` where the host computes; but none
    # where a quantized weight is offloaded.
    quantized = {id(layout.tensors[name]): name in layout.quantized for name in offloaded}
    holds_quantized: dict[nn.Module, bool] = {}  # of each module that holds an offloaded tensor
    for name, tensor in layout.tensors.items():
        for outer in enclosing_modules(name) if id(tensor) in quantized else ():
            around = layout.modules[outer]
            holds_quantized[around] = holds_quantized.get(around, False) or quantized[id(tensor)]
    return [
        MethodWrapper(module, APPLY, partial(_refuse_changes, quantized_too))
        for module, quantized_too in holds_quantized.items()
    ]


def _refuse_changes(always: bool, apply: MethodWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function to the tensors of a module; raise if it would change an offloaded tensor."""
    module = apply.alive_module()
    function: Callable[[Tensor], Tensor] = kwargs["fn"] if "fn" in kwargs else args[0]
    tensors = [*module.parameters(), *module.buffers()]
    if always or any(is_offloaded(tensor) and _changes(function, tensor) for tensor in tensors):
        raise OffloadedError(CANNOT_BE_CHANGED)
    return apply.call_original(args, kwargs)


def _changes(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> bool:
    """Return whether a function returns another tensor, tried on a few elements of the dtype and device in use."""
    fetcher = _fetcher_of(tensor)
    if fetcher is None or not (fetcher.is_computing() or fetcher.keeps_device(tensor)):
        return True  # stored on one device, computed by another
    seen = _fetched(tensor, fetcher) if fetcher.is_computing() else tensor
    with torch.no_grad():
        probe = torch.empty([min(size, 2) for size in seen.shape], dtype=seen.dtype, device=seen.device)
        return fn(probe) is not probe
