"""The classes of the parameters that stage 3 divides. They prevent reads of an empty parameter as if it were full.

DeepSpeed leaves an empty tensor in the module between the uses of a parameter. A copy, a state dict, an average of
weights or a penalty would silently read the empty tensor. Here, a parameter's class changes with its status. An empty
parameter gives its full shape, dtype, device and gradient; any other use is an error with the parameter's name. A
gathered parameter is ordinary, but its `.data` counts writes. DeepSpeed's own code sees the plain tensors.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from drivetrain_backends.compat import as_they_are, tree_leaves
from drivetrain_backends.errors import UnshardedParameterError
from drivetrain_deepspeed import compat

_TENSOR: Any = Tensor
_OF_SHAPE = """
    shape ndim nbytes numel nelement dim ndimension size stride __len__ is_contiguous empty_like zeros_like ones_like
    full_like rand_like randn_like
"""
_OF_KIND = """
    __hash__ requires_grad_ register_hook register_post_accumulate_grad_hook is_floating_point is_complex is_inference
    is_shared is_pinned element_size get_device _has_compatible_shallow_copy_type
"""
_MOVES = frozenset(["to", "type", "cuda", "cpu", "float", "double", "half", "bfloat16"])
_VIEWS = frozenset(["data", "T", "mT", "H", "mH", "real", "imag"])
_TEXTS = frozenset(["__repr__", "__str__", "__format__"])


class _Status:
    """A descriptor for the status of a parameter: setting the status also changes the parameter's class."""

    def __set__(self, parameter: Any, status: Any) -> None:
        parameter.__dict__["ds_status"] = status
        parameter.__class__ = EmptyParameter if status.name == "NOT_AVAILABLE" else GatheredParameter


class GatheredParameter(nn.Parameter):
    """A divided parameter while it is gathered: this rank holds the full values."""

    ds_status = _Status()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values. Writes to them are counted, unlike writes through torch's `.data`."""
        return _TENSOR.data.__get__(self) if _is_of_deepspeed() else self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values is not self and not _is_of_deepspeed() and not compat.is_gathered_by_hand(self):
            _refuse(self, "an assignment to .data")
        _TENSOR.data.__set__(self, values)


class EmptyParameter(nn.Parameter):
    """A divided parameter while it is not gathered: this rank holds only its part."""

    ds_status = _Status()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a full copy while a model is built, since stacks of layers copy a layer; otherwise refuse."""
        if not _is_building():
            _refuse(self, "a copy")
        with _gather([self]):
            return cast("Any", GatheredParameter).__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self, "a pickle")

    @classmethod
    def __torch_function__(  # pyright: ignore[reportIncompatibleVariableOverride]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with as_they_are():
            if _is_of_deepspeed():
                return func(*args, **kwargs)
            return _answer(func, args, kwargs)


def guard(parameters: Mapping[Any, str] | Iterable[Any]) -> None:
    """Keep the class of divided parameters in step with their status; a mapping gives their names for errors."""
    for parameter in parameters:
        if isinstance(parameters, Mapping):
            parameter.__dict__["full_name"] = parameters[parameter]
        if compat.is_divided(parameter) and type(parameter) is nn.Parameter:
            status: Any = parameter.__dict__["ds_status"]
            parameter.__class__ = GatheredParameter
            cast("Any", parameter).ds_status = status


def unguard(parameters: Iterable[Any]) -> None:
    """Restore the original class of parameters, once their engine has ended."""
    for parameter in parameters:
        if type(parameter) in (GatheredParameter, EmptyParameter):
            parameter.__class__ = nn.Parameter


def _is_building() -> bool:
    """Return whether the code runs inside `zero.Init`."""
    from deepspeed.runtime.zero import partition_parameters

    return partition_parameters.zero_init_context > 0


def _gather(parameters: list[Any]) -> AbstractContextManager[None]:
    """Gather parameters in the block; all ranks get the values that rank 0 writes. Called on all ranks."""
    from deepspeed import zero

    return zero.GatheredParameters(parameters, modifier_rank=0)


def _is_of_deepspeed() -> bool:
    """Return whether the function that calls this one was called by DeepSpeed's code."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    return frame.f_globals.get("__name__", "").startswith("deepspeed.")


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute a function of an empty parameter if it needs only shape, dtype or device; refuse others."""
    name: str = func.__name__
    access = name if name in ("__get__", "__set__", "__delete__") else None
    if access:
        name = func.__self__.__name__  # pyright: ignore[reportFunctionMemberAccess]
    first = args[0] if args else None
    if isinstance(first, EmptyParameter):
        if name in _OF_SHAPE.split():
            return _compute_on_full_shape(func, first, args, kwargs)
        if name in _TEXTS:
            return f"Parameter of shape {tuple(compat.full_shape(first))}, divided among ranks"
        if _is_of_kind(name, access, args):
            return func(*args, **kwargs)
        if name in _MOVES and (moved := func(*args, **kwargs)) is first:
            return moved
        if access == "__get__" and name == "data":
            return first  # on whose values every call is refused or, while a model is built, made
        if access:
            _refuse(first, f"{'a read of' if access == '__get__' else 'an assignment to'} .{name}")
    if func is torch.autograd.grad:  # which the engine's hooks refuse
        return func(*args, **kwargs)
    found = [one for one in tree_leaves((args, kwargs)) if isinstance(one, EmptyParameter)]
    if _is_building() and name.endswith("_") and not name.startswith("_"):
        with _gather(found), torch.no_grad():
            return func(*args, **kwargs)
    return _refuse(found[0], f"{name}()")


def _is_of_kind(name: str, access: str | None, args: tuple[Any, ...]) -> bool:
    """Return whether a function of an empty parameter neither reads nor writes its values."""
    if access == "__set__":
        return name not in ("data", "grad") or args[1] is (args[0] if name == "data" else None)
    if name == "view_as":  # of itself: so torch finds the node that adds up a gradient
        return args[1] is args[0]
    return name in _OF_KIND.split() or access == "__delete__" or (access == "__get__" and name not in _VIEWS)


def _compute_on_full_shape(
    func: Callable[..., Any], parameter: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Compute a function that needs only the shape, on a tensor of the full shape without values."""
    full = torch.empty(compat.full_shape(parameter), dtype=parameter.dtype, device="meta")
    made = func.__name__.endswith("_like")
    return func(full, *args[1:], **({"device": parameter.device, **kwargs} if made else kwargs))


def _refuse(parameter: Any, what: str) -> NoReturn:
    """Refuse an operation, described by `what`, that needs the values of a divided parameter."""
    name = parameter.__dict__.get("full_name", "a parameter")
    raise UnshardedParameterError(
        f"{what} of {name}, of shape {tuple(compat.full_shape(parameter))}: DeepSpeed's stage 3 divides it among "
        "ranks. Read and write full values inside accelerator.gathered(model, write=True), on all ranks; a copy, a "
        "file or an average of the weights is made of accelerator.get_state_dict(model), and a saved one goes in "
        "with load_state(). A term of the loss that reads weights belongs into the forward of the module that holds "
        "them; dtypes and devices are chosen before prepare()"
    )
