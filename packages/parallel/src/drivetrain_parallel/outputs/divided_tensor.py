"""Tensors of which each rank holds a part, joined only when something needs the parts of others.

A `DividedTensor` looks like the whole. What treats each row alone is computed on this rank's part, and so is
`F.cross_entropy`. Anything else joins the parts first, and goes on with the plain whole tensor.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from drivetrain_parallel.compat import (
    DisableTorchFunctionSubclass,
    changes_in_place,
    make_wrapper,
    once_differentiable,
    tree_map_only,
)
from drivetrain_parallel.outputs.layout import PartLayout
from drivetrain_parallel.outputs.row_functions import RowCall, is_by_row, rows_seen
from drivetrain_parallel.outputs.vocabulary_loss import cross_entropy_of_parts

# The names of functions and attributes that need no values.
_ABOUT = (
    "size", "dim", "stride", "numel", "nelement", "__len__", "is_contiguous", "is_floating_point", "is_complex",
)  # fmt: skip
_OF_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")  # of all attributes, those that do
_OF_AUTOGRAD = ("register_hook", "retain_grad", "grad")  # the last: an attribute, and a function of autograd


class DividedTensor(Tensor):
    """A tensor of shape (..., columns), of which this rank holds some rows, or some columns of each.

    Autograd follows the whole tensor, so that hooks on it, and functions that know nothing of parts, work. A gradient
    that reaches it may be whole, or be divided as well.

    Once joined, it stays so: what follows sees the changes in place that were made to the whole tensor. A view is
    therefore joined by joining what it is a view of.

    Attributes:
        part: The values that this rank holds, of shape (own rows, own columns), without a graph; empty once joined.
        held: The layout of the parts of all ranks.
        place: The name of this tensor, the same on all ranks, and another for other tensors.
        uses: The count of the tensors that are computed of this one, for their names.
        whole: The whole tensor, once joined.
        node: The node of the graph that has joined it.
        seen_of: The tensor of which this is a view, and what makes the view of the whole; None if it is none.
    """

    part: Tensor
    held: PartLayout
    place: str
    uses: "count[int]"
    whole: Tensor | None
    node: object
    seen_of: "tuple[DividedTensor, Callable[[Tensor], Tensor]] | None"

    @classmethod
    def of(cls, part: Tensor, layout: PartLayout, place: str) -> Self:
        """Return the tensor of a part, without a graph."""
        num_columns = sum(layout.sizes)
        strides = (*(stride * num_columns for stride in layout.rows.stride()), 1)
        made = make_wrapper(cls, part, (*layout.rows.shape, num_columns), strides)
        made.part, made.held, made.place, made.uses = part.detach(), layout, place, count()
        made.whole = made.node = made.seen_of = None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute a function of torch on parts if it treats each row alone, else on the joined tensors."""
        del types
        if torch.compiler.is_compiling():
            return cast("Any", torch.compiler.disable(_compute))(func, args, kwargs or {})
        return _compute(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Join where code in C++ computes with the tensor, which autograd follows already.

        Divided gradients, which autograd adds up so, stay divided.
        """
        del types
        name, kwargs = str(func), kwargs or {}
        if func is torch.ops.aten.add.Tensor and not kwargs and all(type(one) is cls for one in args):
            one, other = args
            if one.held.is_like(other.held) and not (one.is_joined or other.is_joined):
                return cls.of(one.part + other.part, one.held, one.next_place(other.place))
        if args and type(args[0]) is cls and changes_in_place(func):
            raise RuntimeError(
                f"{name} changes a divided tensor in place, past torch's functions: give it `torch.cat([tensor])`, "
                "which is the whole"
            )
        args, kwargs = tree_map_only(cls, lambda one: one.joined(name).detach(), (args, kwargs))
        return func(*args, **kwargs)

    @property
    def divided_among(self) -> int:
        """The number of ranks among which a module that is given this tensor is divided."""
        if self.is_joined or not self.held.averages:  # which any function of a module joins
            return 1
        return self.held.row_ranks.size * self.held.column_ranks.size

    @property
    def is_followed(self) -> bool:
        """True if all gradients of this tensor pass through it: it is no view, and did not change in place."""
        return self.seen_of is None and (self.whole is None or self.whole.grad_fn is self.node)

    @property
    def is_joined(self) -> bool:
        """True once this tensor is joined, or that of which it is a view."""
        return self.whole is not None or (self.seen_of is not None and self.seen_of[0].is_joined)

    def next_place(self, by: str) -> str:
        """Return the name of what is computed of this tensor next; `by` says how."""
        return f"{self.place}.{by} {next(self.uses)}"

    def joined(self, by: str) -> Tensor:
        """Return the whole tensor, joined once. Called on all ranks; `by` is the name of what asks for it."""
        if self.whole is None:
            # A later use may want its gradient, and a checkpoint, which runs this once, would miss what it saves.
            with (
                torch.inference_mode(mode=False),
                torch.enable_grad(),
                saved_tensors_hooks(_as_it_is, _as_it_is),
            ):
                if self.seen_of is not None:
                    base, see = self.seen_of
                    self.whole = see(base.joined(by))
                else:
                    self.held.meet(self.place, by)
                    self.whole = self.held.join(_part_of(self))
                    self.node = self.whole.grad_fn
            self.part = self.part.new_empty(0)
        return self.whole


def _as_it_is(saved: Any) -> Any:
    return saved


def divided(part: Tensor, layout: PartLayout, place: str) -> DividedTensor:
    """Return the whole of which this rank holds `part`, of shape (..., own columns); see `DividedTensor`.

    All ranks call the same functions with it.
    """
    return _Divide.apply(part.flatten(0, -2), layout, place)  # type: ignore[no-any-return]


def own_states(tensor: Tensor, rows: Tensor) -> Tensor | None:
    """Return this rank's part of states (batch, own length, width) with these rows; None if its rows are others."""
    if type(tensor) is not DividedTensor or tensor.is_joined or tensor.held.rows is not rows:
        return None
    return _part_of(tensor).unflatten(0, (len(rows), -1))


def by_rows(function: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """Return what a function computes that treats each row alone, of own rows where ranks hold different ones.

    It may divide the columns of what it returns among other ranks.
    """
    if type(tensor) is not DividedTensor or tensor.is_joined or tensor.held.row_ranks.size == 1:
        return function(tensor)
    if not tensor.held.averages:
        return function(tensor.joined("forward"))
    found = function(_part_of(tensor))
    if type(found) is not DividedTensor:
        return divided(found, tensor.held.of_found(found), tensor.next_place("forward"))
    columns = {"sizes": found.held.sizes, "column_ranks": found.held.column_ranks}
    layout = replace(tensor.held, rows=tensor.held.dense_rows, **columns)
    return divided(_part_of(found), layout, tensor.next_place(found.place))


class _Divide(Function):
    """The whole tensor, of this rank's part: the gradient is a part too."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, layout: PartLayout, place: str) -> DividedTensor:
        ctx.layout = layout
        return DividedTensor.of(part, layout, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if type(gradient) is DividedTensor and not gradient.is_joined:
            if gradient.held.is_like(ctx.layout.of_gradient):
                return gradient.part, None, None
            gradient = gradient.joined("backward")
        return ctx.layout.own_gradient(gradient), None, None


class _PartOf(Function):
    """The part of this rank: the gradients of all parts are that of the whole."""

    @staticmethod
    def forward(ctx: Any, tensor: DividedTensor) -> Tensor:
        ctx.layout, ctx.place = tensor.held, f"the gradient of {tensor.place}"
        return tensor.part.view_as(tensor.part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> DividedTensor:
        return DividedTensor.of(gradients[0], ctx.layout.of_gradient, ctx.place)


def _part_of(tensor: DividedTensor) -> Tensor:
    return _PartOf.apply(tensor)  # type: ignore[no-any-return]


def _compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function computes that is given divided tensors."""
    is_attribute = func.__name__ in ("__get__", "__set__")
    name: str = getattr(func, "__self__", func).__name__ if is_attribute else func.__name__
    if name in _OF_AUTOGRAD:
        args, kwargs = tree_map_only(
            DividedTensor, lambda one: one if one.is_followed else one.joined(name), (args, kwargs)
        )
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    given = [one for one in args if type(one) is DividedTensor]
    if given and not any(one.is_joined for one in given):
        if (is_attribute and name not in _OF_VALUES) or name in _ABOUT:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        tensor, held = given[0], given[0].held
        # A function of autograd that returns its argument asks for a view.
        if name == "view_as" and all(one is tensor for one in args):
            return divided(_part_of(tensor), held, tensor.next_place(name))
        found = _in_parts(func, given, args, kwargs) if held.averages and held.factor == 1 else None
        if found is not None:
            return found
    args, kwargs = tree_map_only(DividedTensor, lambda one: one.joined(name), (args, kwargs))
    return func(*args, **kwargs)


def _in_parts(
    func: Callable[..., Any], given: list[DividedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return what a function computes of divided tensors, in parts; None if it does more than treat rows alone."""
    tensor, name = given[0], func.__name__
    if not all(one.held.is_like(tensor.held) for one in given):
        return None
    if args[0] is tensor and len(given) == 1:
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if (rows := rows_seen(name, tensor.held, args[1:], kwargs)) is not None:
            return _of_rows(tensor, rows, func, args[1:], kwargs)
    parts = {id(one): _part_of(one) for one in given}
    own_args = tuple(parts.get(id(one), one) for one in args)
    call = RowCall(layout=tensor.held, parts=tuple(parts.values()), args=own_args, kwargs=kwargs)
    if not is_by_row(name, call):
        return None
    found: Tensor = func(*own_args, **kwargs)
    if found is own_args[0]:
        return tensor
    is_of_rows = found.device == tensor.device and found.is_floating_point()
    return divided(found, tensor.held.of_found(found), tensor.next_place(name)) if is_of_rows else None


def _of_rows(
    tensor: DividedTensor,
    rows: Tensor,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> DividedTensor:
    """Return the tensor of some of the rows, of the same part unless they are few or chosen one by one."""
    if rows is tensor.held.rows:
        return tensor
    is_view = rows.untyped_storage().data_ptr() == tensor.held.rows.untyped_storage().data_ptr()
    part, is_chosen = _part_of(tensor), func.__name__ == "__getitem__" and not is_view
    if is_chosen or 2 * rows.numel() < tensor.held.num_own * tensor.held.row_ranks.size:
        part, layout = tensor.held.taken(part, rows)
    else:
        layout = replace(tensor.held, rows=rows)
    made = divided(part, layout, tensor.next_place(func.__name__))
    if is_view:
        made.seen_of = tensor, lambda whole: func(whole, *args, **kwargs)
    return made


def _cross_entropy(logits: DividedTensor, target: Any, **options: Any) -> Tensor | None:
    """Return the loss of (rows, words) and (rows,) in parts; None for other forms and for what torch refuses.

    The options are all those of `F.cross_entropy`, as it passes them on.
    """
    weight, reduction = options["weight"], options["reduction"]
    is_of_rows = logits.dim() == 2 and _is_plain(target) and target.dtype is torch.int64
    if not is_of_rows or target.shape != logits.shape[:1] or target.device != logits.device:
        return None
    if weight is not None and not (_is_plain(weight) and weight.shape == logits.shape[1:]):
        return None
    is_known = options.pop("size_average") is options.pop("reduce") is None
    if not is_known or reduction not in ("none", "mean", "sum") or not 0 <= options["label_smoothing"] <= 1:
        return None
    loss = cross_entropy_of_parts(_part_of(logits), target, logits.held, **options)
    return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a plain tensor that wants no gradient, of which each rank would compute a part."""
    return type(value) is Tensor and not value.requires_grad
