"""Tensors that another stage computes: of a shape, a dtype and a device, without values.

What depends on one is one. So a stage may run the whole forward of a model, of which it holds some layers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain_parallel.compat import (
    DisableTorchFunctionSubclass,
    changes_in_place,
    changes_shape_in_place,
    make_wrapper,
    tree_map_only,
)
from drivetrain_parallel.errors import ParallelPlanError


class AbsentValueError(ParallelPlanError):
    """An error of an operation that needs the values of an absent tensor."""


class AbsentTensor(Tensor):
    """A tensor whose values another stage has. Operations on it give the shapes, on the meta device.

    Attributes:
        of: The name of the parameter or the block that it follows from.
        received: The values, once the stage that has them has sent them: what reads the tensor then reads these.

    Raises:
        AbsentValueError: An operation asks for its values, or writes them to a tensor of this stage.
    """

    of: str
    received: Tensor | None = None
    _like: Tensor  # on meta

    @staticmethod
    def __new__(cls: type["AbsentTensor"], like: Tensor, device: torch.device, of: str) -> "AbsentTensor":
        """Return a tensor like one on meta, that says it is on `device`."""
        made = make_wrapper(cls, like, like.shape, like.stride(), device=device)
        made._like, made.of = like, of
        return made

    def __init__(self, like: Tensor, device: torch.device, of: str) -> None:
        pass

    def __repr__(self, **_: Any) -> str:
        """Return the shape, in place of values."""
        return f"AbsentTensor({tuple(self.shape)}, dtype={self.dtype}, of={self.of})"

    def anew(self) -> "AbsentTensor":
        """Return another tensor like this one, without values."""
        return AbsentTensor(self._like, self.device, self.of)

    def tolist(self) -> Any:
        """Refuse to return values."""
        raise AbsentValueError(_needs_values("tolist()", self))

    def numpy(self, **_: Any) -> Any:
        """Refuse to return values."""
        raise AbsentValueError(_needs_values("numpy()", self))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, above autograd, with what was received in place of the tensors that stand for it."""
        del types
        given = tree_map_only(
            AbsentTensor, lambda one: one if one.received is None else one.received, (args, kwargs)
        )
        with DisableTorchFunctionSubclass():
            return func(*given[0], **(given[1] or {}))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation on meta; return absent tensors."""
        del types
        given: list[Tensor] = []
        on_meta = tree_map_only(Tensor, lambda one: _on_meta(one, given), (tuple(args), dict(kwargs or {})))
        source = next(one for one in given if isinstance(one, AbsentTensor))
        device = (kwargs or {}).get("device") or source.device
        if "device" in on_meta[1]:
            on_meta[1]["device"] = torch.device("meta")
        is_written = changes_in_place(func)
        if is_written and (given[0] is not source or changes_shape_in_place(func)):
            raise AbsentValueError(f"{func} writes what follows from {source.of}, of another stage, in place")
        try:
            found = func(*on_meta[0], **on_meta[1])
        except (RuntimeError, NotImplementedError) as error:
            raise AbsentValueError(_needs_values(func, source)) from error
        if is_written:
            return source
        return tree_map_only(Tensor, lambda one: AbsentTensor(one, torch.device(device), source.of), found)


def _needs_values(operation: object, tensor: AbsentTensor) -> str:
    return (
        f"{operation} reads values that follow from {tensor.of}, which another stage has: a model in stages reads no "
        "values between its blocks"
    )


def _on_meta(one: Tensor, given: list[Tensor]) -> Tensor:
    given.append(one)
    return one._like if isinstance(one, AbsentTensor) else one.to("meta")  # pyright: ignore[reportPrivateUsage]


def absent_like(tensor: Tensor, of: str) -> AbsentTensor:
    """Return an absent tensor of a tensor's shape, dtype and device."""
    if isinstance(tensor, AbsentTensor):
        return tensor
    return AbsentTensor(torch.empty_like(tensor, device="meta"), tensor.device, of)
