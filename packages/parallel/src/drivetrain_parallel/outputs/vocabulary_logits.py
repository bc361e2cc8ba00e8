"""Logits of which each rank holds some words, joined only when something needs the words of others.

`DividedLogits` is a tensor that looks like the whole logits. What treats each row alone is computed on this rank's
part, and so is `F.cross_entropy`. Anything else joins the parts first, and goes on with the plain whole tensor.
"""

from collections.abc import Callable
from math import prod
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drivetrain_parallel.compat import (
    DisableTorchFunctionSubclass,
    changes_in_place,
    make_wrapper,
    tree_map_only,
)
from drivetrain_parallel.outputs.vocabulary_loss import cross_entropy_of_parts
from drivetrain_parallel.ranks import TensorRanks, join

# The names of functions that treat each row alone, if their other arguments do.
_OF_ELEMENTS = ("to", "float", "double", "half", "bfloat16", "contiguous", "clone", "tanh", "flatten")
_BY_ROW = (*_OF_ELEMENTS, "mul", "div", "view", "reshape", "__getitem__")
# The names of functions and attributes that need no values.
_ABOUT = (
    "size", "dim", "stride", "numel", "nelement", "__len__", "is_contiguous", "is_floating_point", "is_complex",
)  # fmt: skip
_OF_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")  # of all attributes, those that do
_OF_AUTOGRAD = (
    "register_hook",
    "retain_grad",
    "grad",
)  # the last is an attribute, and a function of autograd


class DividedLogits(Tensor):
    """Logits of shape (..., words), of which this rank holds some words of each row.

    Autograd follows the whole tensor, so that hooks on it, and functions that know nothing of parts, work. A gradient
    that reaches it may be whole, or be divided as well.

    Once joined, it stays so: what follows sees the changes in place that were made to the whole tensor. A view is
    therefore joined by joining what it is a view of.

    Attributes:
        part: The logits of this rank's words, without a graph; empty once joined.
        sizes: The number of words of each rank.
        ranks: The ranks that hold them.
        place: The name of these logits, the same on all ranks, and another for other logits.
        whole: All logits, once joined.
        node: The node of the graph that has joined them.
        base: The logits of which these are a view; None if they are none.
        view_of: The function that makes them of the whole base.
    """

    part: Tensor
    sizes: tuple[int, ...]
    ranks: TensorRanks
    place: str
    whole: Tensor | None
    node: object
    base: "DividedLogits | None"
    view_of: Callable[[Tensor], Tensor] | None

    @classmethod
    def of(cls, part: Tensor, sizes: tuple[int, ...], ranks: TensorRanks, place: str) -> Self:
        """Return the logits of a part, without a graph."""
        made = make_wrapper(cls, part, sum(sizes))
        made.part, made.sizes, made.ranks, made.place = part.detach(), sizes, ranks, place
        made.whole = made.node = made.base = made.view_of = None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute a function of torch on the part if it treats each row alone, else on the joined logits."""
        del types
        if torch.compiler.is_compiling():
            return cast("Any", torch.compiler.disable(_compute))(func, args, kwargs or {})
        return _compute(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Join where code in C++ computes with the logits, which autograd follows already.

        Divided gradients, which autograd adds up so, stay divided.
        """
        del types
        name, kwargs = str(func), kwargs or {}
        if func is torch.ops.aten.add.Tensor and not kwargs and all(type(one) is cls for one in args):
            one, other = args
            if one.sizes == other.sizes and not (one.is_joined or other.is_joined):
                return cls.of(one.part + other.part, one.sizes, one.ranks, f"{one.place} + {other.place}")
        if args and type(args[0]) is cls and changes_in_place(func):
            raise RuntimeError(
                f"{name} changes divided logits in place, past torch's functions: give it `logits.clone()`, or the "
                "head the style 'gathered_column'"
            )
        args, kwargs = tree_map_only(cls, lambda one: one.joined(name).detach(), (args, kwargs))
        return func(*args, **kwargs)

    @property
    def is_followed(self) -> bool:
        """True if all gradients of these logits pass through them: they are no view, and did not change in place."""
        return self.base is None and (self.whole is None or self.whole.grad_fn is self.node)

    @property
    def is_joined(self) -> bool:
        """True once these logits are joined, or those of which they are a view."""
        return self.whole is not None or (self.base is not None and self.base.is_joined)

    def joined(self, by: str) -> Tensor:
        """Return the whole logits, joined once. Called on all ranks; `by` is the name of what asks for them."""
        if self.whole is None:
            with torch.inference_mode(mode=False), torch.enable_grad():  # a later use may want its gradient
                if self.base is not None and self.view_of is not None:
                    self.whole = self.view_of(self.base.joined(by))
                else:
                    self.ranks.meet(self.place, by)
                    self.whole = join(_part_of(self), -1, self.sizes, self.ranks)
                    self.node = self.whole.grad_fn
            self.part = self.part.new_empty(0)
        return self.whole


def divided_logits(part: Tensor, sizes: tuple[int, ...], ranks: TensorRanks, place: str) -> DividedLogits:
    """Return the whole logits of which this rank holds `part`, of shape (..., own words); see `DividedLogits`.

    All ranks call the same functions with them.
    """
    return _Divide.apply(part, sizes, ranks, place)  # type: ignore[no-any-return]


class _Divide(Function):
    """The whole logits, of this rank's part: the gradient is a part too."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, sizes: tuple[int, ...], ranks: TensorRanks, place: str
    ) -> DividedLogits:
        ctx.own = -1, sum(sizes[: ranks.rank]), part.shape[-1]
        return DividedLogits.of(part, sizes, ranks, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        if type(gradient) is DividedLogits and not gradient.is_joined:
            return gradient.part, None, None, None
        return gradient.narrow(*ctx.own), None, None, None


class _PartOf(Function):
    """The part of this rank: the gradients of all parts are that of the whole."""

    @staticmethod
    def forward(ctx: Any, logits: DividedLogits) -> Tensor:
        ctx.how = logits.sizes, logits.ranks, f"the gradient of {logits.place}"
        return logits.part.view_as(logits.part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> DividedLogits:
        return DividedLogits.of(gradients[0], *ctx.how)


def _part_of(logits: DividedLogits) -> Tensor:
    return _PartOf.apply(logits)  # type: ignore[no-any-return]


def _compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function computes that is given divided logits."""
    is_attribute = func.__name__ in ("__get__", "__set__")
    name: str = getattr(func, "__self__", func).__name__ if is_attribute else func.__name__
    if name in _OF_AUTOGRAD:
        args, kwargs = tree_map_only(
            DividedLogits, lambda one: one if one.is_followed else one.joined(name), (args, kwargs)
        )
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if args and type(args[0]) is DividedLogits and not args[0].is_joined:
        logits, *others = args
        if (is_attribute and name not in _OF_VALUES) or name in _ABOUT:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = None
        if func is F.cross_entropy:
            found = _cross_entropy(logits, *others, **kwargs)
        elif name in _BY_ROW:
            found = _by_row(logits, func, tuple(others), kwargs)
        if found is not None:
            return found
    args, kwargs = tree_map_only(DividedLogits, lambda one: one.joined(name), (args, kwargs))
    return func(*args, **kwargs)


def _by_row(
    logits: DividedLogits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DividedLogits | None:
    """Return what a function computes, in parts; None if it does more than treat each row alone."""
    own_args = None if "out" in kwargs else _own_arguments(logits, func.__name__, args)
    if own_args is None:
        return None
    part = _part_of(logits)
    found: Tensor = func(part, *own_args, **kwargs)
    if found is part:
        return logits
    if found.shape[-1:] != part.shape[-1:] or found.device != part.device or not found.is_floating_point():
        return None
    made = divided_logits(found, logits.sizes, logits.ranks, f"{logits.place}.{func.__name__}")
    if found.untyped_storage().data_ptr() == part.untyped_storage().data_ptr():
        made.base, made.view_of = logits, lambda whole: func(whole, *args, **kwargs)
    return made


def _own_arguments(logits: DividedLogits, name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a function's other arguments as they read for the part; None if they reach beyond a row."""
    if name in _OF_ELEMENTS:
        return args
    if name in ("mul", "div"):
        is_number = len(args) == 1 and (
            isinstance(args[0], (int, float)) or (_is_plain(args[0]) and args[0].dim() == 0)
        )
        return args if is_number else None
    if name == "__getitem__":
        return (
            args if _is_index_of_rows(args[0] if isinstance(args[0], tuple) else args, logits.dim()) else None
        )
    sizes = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if not sizes or any(type(size) is not int for size in sizes):
        return None
    is_rest = sizes[-1] == -1 and prod(sizes[:-1]) == prod(logits.shape[:-1])
    return (*sizes[:-1], logits.part.shape[-1]) if is_rest or sizes[-1] == logits.shape[-1] else None


def _is_index_of_rows(items: tuple[Any, ...], dim: int) -> bool:
    """Return whether an index of a tensor of some dimensions takes the last of them in full."""
    num_indexed = 0
    for item in items:
        if _is_plain(item) and item.dtype in (torch.bool, torch.int64):
            num_indexed += item.dim() if item.dtype is torch.bool else 1
        elif type(item) in (int, slice):
            num_indexed += 1
        elif item is not None and item is not Ellipsis:
            return False
    if items and isinstance(items[-1], slice) and items[-1] == slice(None):
        return True
    ends_early = bool(items) and (items[-1] is Ellipsis or not any(item is Ellipsis for item in items))
    return ends_early and num_indexed < dim


def _cross_entropy(
    logits: DividedLogits,
    target: Any,
    weight: Any = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss of (rows, words) and (rows,) in parts; None for other forms and for what torch refuses."""
    is_of_rows = logits.dim() == 2 and _is_plain(target) and target.dtype is torch.int64
    if not is_of_rows or target.shape != logits.shape[:1] or target.device != logits.device:
        return None
    if weight is not None and not (_is_plain(weight) and weight.shape == logits.shape[1:]):
        return None
    is_known = size_average is reduce is None and reduction in ("none", "mean", "sum")
    if not is_known or not 0 <= label_smoothing <= 1:
        return None
    loss = cross_entropy_of_parts(
        _part_of(logits),
        target,
        logits.sizes,
        logits.ranks,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a plain tensor that wants no gradient, of which each rank would compute a part."""
    return type(value) is Tensor and not value.requires_grad
