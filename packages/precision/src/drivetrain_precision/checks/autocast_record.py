"""Autocast with a record of the operations that ran in fp32 and in half precision."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain_precision.checks.call_sites import call_site, module_names
from drivetrain_precision.compat import Args, Kwargs

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Functions that copy values, for some in a dtype that the caller chose.
_CASTS = (
    *("to", "type", "type_as", "float", "double", "half", "bfloat16"),
    *("clone", "contiguous", "detach", "reshape"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastOperation:
    """An operation that ran under a recorded autocast, with its name, such as "softmax", and its result's dtype.

    Attributes:
        module: The calling module's name in the model or, if the model is unknown, the name of the module's class;
            "" outside of modules.
    """

    name: str
    dtype: torch.dtype
    module: str
    num_calls: int

    @property
    def is_fp32(self) -> bool:
        """True if the operation ran in fp32."""
        return self.dtype is torch.float32


class RecordedAutocast:
    """A context and decorator that applies autocast and records operations; see `autocast(..., record=True)`.

    The context can be entered again, also inside itself; its record then grows.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]], model: nn.Module | None) -> None:
        self._make = make
        self._entered: list[ExitStack] = []
        self._record = _Record(module_names(model))

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if not self._entered:
                stack.enter_context(self._record)
            stack.enter_context(self._make())
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a function that runs `function` under this autocast."""

        @wraps(function)
        def recorded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return recorded

    def operations(self) -> tuple[AutocastOperation, ...]:
        """Return the operations that ran on floating-point tensors, by name, dtype and module, by first run.

        Views, copies, explicit casts and torch's own operations in backward are left out.
        """
        return tuple(
            AutocastOperation(name=name, dtype=dtype, module=module, num_calls=calls)
            for (name, dtype, module), calls in self._record.calls.items()
        )

    def fp32_operations(self) -> tuple[AutocastOperation, ...]:
        """Return the operations that ran in fp32."""
        return tuple(one for one in self.operations() if one.is_fp32)


class _Record(TorchFunctionMode):
    """A count of calls of torch's functions by name, dtype of the result and module."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.calls: dict[tuple[str, torch.dtype, str], int] = {}
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(getattr(func, "__name__", func)).strip("_")
        made = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(made, Tensor) and made.is_floating_point() and _computes(name, made, args):
            site = call_site(self._names)
            key = name, made.dtype, "" if site is None else site.module
            self.calls[key] = self.calls.get(key, 0) + 1
        return result


def _computes(name: str, made: Tensor, args: tuple[Any, ...]) -> bool:
    """Return whether a function computed its result and did not just cast, copy or view an input."""
    given = [one for one in args if isinstance(one, Tensor) and one.is_floating_point()]
    if name in ("get", "set", *_CASTS) or not given:
        return False
    # A subclass may have no storage to compare.
    if type(made) is not Tensor or any(type(one) not in (Tensor, nn.Parameter) for one in given):
        return True
    start = made.untyped_storage().data_ptr()
    return start == 0 or all(one is made or one.untyped_storage().data_ptr() != start for one in given)
