"""Count underflow in the values that pass between modules, and find the first module that overflows.

Hooks see each module's inputs and outputs, and the gradients of both. The hooks count on the device; they do not
change the bits that a step computes.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_precision.compat import is_in_backward
from drivetrain_precision.scaling.gradient_report import (
    GradientReport,
    LayerGradients,
    NonFiniteValue,
    Where,
    first_of_ranks,
)
from drivetrain_precision.scaling.layer_counts import LayerCounts, LayerTotals
from drivetrain_precision.scaling.watched_layers import tensors_in, watched_layers

Gather = Callable[[Any], list[Any]]
_HALF = (torch.float16, torch.bfloat16)
_MOST_CALLS = 100  # told apart in one forward; a recurrent layer may have thousands


class _Event(NamedTuple):
    """The identity of an inspected tensor."""

    layer: int
    where: Where
    dtype: torch.dtype
    parameter: str | None
    call: int


@dataclass(slots=True, eq=False)
class _Call:
    """A call of a module."""

    layer: int
    number: int  # in its forward, from 1
    is_counted: bool  # in a training forward, and not one that backward computes again
    is_reached: bool = True  # by the gradient of its output, as far as one is awaited


class GradientWatch(AbstractContextManager["GradientWatch"]):
    """Hooks on all modules of models that count on the device. Each model has a prefix for its modules' names.

    With `inside_compiled`, also on those that torch.compile compiles, for forwards in which it is turned off.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], *, underflow: bool = True, inside_compiled: bool = False
    ) -> None:
        self._layers, self._not_watched = watched_layers(models, inside_compiled=inside_compiled)
        self._counts = LayerCounts(len(self._layers))
        self._underflow = underflow
        self._events: list[_Event] = []
        self._ids: dict[_Event, int] = {}
        self._dtypes: dict[int, torch.dtype] = {}  # of each layer's outputs
        self._open: dict[int, _Call] = {}
        self._num_calls = [0] * len(self._layers)
        self._is_training_forward = False
        self._is_closed = False
        self._hooked = WeakIdKeyDictionary()  # parameters, with their handles
        self._handles: list[RemovableHandle] = []
        for index, layer in enumerate(self._layers):
            self._handles += [
                layer.module.register_forward_pre_hook(_Hook(self.enter, index), with_kwargs=True),
                layer.module.register_forward_hook(_Hook(self.leave, index), with_kwargs=True),
            ]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks; the counts can still be reported."""
        self._is_closed = True
        for handle in [*self._handles, *self._hooked.values()]:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    @property
    def has_seen(self) -> bool:
        """True if a hook inspected a value, which shows that a training forward ran through a watched module."""
        return self._counts.num_events > 0

    def forget_first(self) -> None:
        """Forget the first non-finite value, such as before the next step; keep the other counts."""
        self._counts.forget_first()

    def reset(self) -> None:
        """Set all counts to zero, such as for the next report."""
        self._counts.reset()

    def first_nonfinite(self, *, gather: Gather | None = None) -> NonFiniteValue | None:
        """Return the first value that is not finite, in order of execution, on any rank. Synchronizes.

        Called on all ranks, or on one rank with a `gather` that returns `[value]`. The default is torch's gather.
        """
        return first_of_ranks((gather or _gather)(self._find_own_first()))

    def report(self, *, gather: Gather | None = None) -> GradientReport:
        """Return the counts so far, summed over ranks. Called on ranks as `first_nonfinite` is. Synchronizes."""
        found = (gather or _gather)((self._counts.totals(), self._find_own_first()))
        sums = [LayerTotals()] * len(self._layers)
        for totals, _ in found:
            sums = [mine.plus(theirs) for mine, theirs in zip(sums, totals, strict=True)]
        rows = [
            LayerGradients(
                name=layer.name,
                layer_type=type(layer.module).__name__,
                dtype=_short(self._dtypes.get(index)),
                totals=total,
            )
            for index, (layer, total) in enumerate(zip(self._layers, sums, strict=True))
            # Modules without parameters of their own, that hold others, only pass values on.
            if total.values
            and (any(True for _ in layer.module.parameters(recurse=False)) or not [*layer.module.children()])
        ]
        rows.sort(key=lambda row: -row.zero_share - row.subnormal_share)
        return GradientReport(
            layers=tuple(rows),
            first_nonfinite=first_of_ranks([first for _, first in found]),
            not_watched=self._not_watched,
        )

    def enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Inspect a module's inputs and, in backward, their gradients; a forward pre-hook."""
        if self._is_closed:
            return None
        call = self._open[index] = self._begin_call(index)
        if call.is_counted:
            for tensor in tensors_in((args, kwargs)):
                self._counts.add_activation(
                    index, tensor, self._id(call, "input", tensor.dtype), is_input=True
                )
        if not torch.is_grad_enabled():
            return None
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in self._hooked:
                first = _Call(index, 1, is_counted=True)  # a parameter's gradient is the sum over all calls
                look = partial(self._look, first, "parameter gradient", counts=True, parameter=name)
                self._hooked[parameter] = parameter.register_hook(unserializable_hook(look))
        return self._alias_inputs(call, args, kwargs)

    def leave(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Inspect a module's outputs and, in backward, their gradients; a forward hook."""
        del module, args, kwargs
        call = self._open.pop(index, None)
        if self._is_closed or call is None:
            return

        @unserializable_hook
        def reached(gradient: Tensor) -> None:
            call.is_reached = True
            self._look(call, "output gradient", gradient, counts=True)

        for tensor in tensors_in(output):
            self._dtypes[index] = tensor.dtype
            if call.is_counted:
                self._counts.add_activation(
                    index, tensor, self._id(call, "output", tensor.dtype), is_input=False
                )
            if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
                call.is_reached = False
                tensor.register_hook(reached)

    def _begin_call(self, index: int) -> _Call:
        if is_in_backward():  # a checkpointed forward, whose activations were counted when it first ran
            return _Call(index, 1, is_counted=False)
        is_training = torch.is_grad_enabled()
        if self._layers[index].parent is None:
            self._is_training_forward = is_training
            self._num_calls = [0] * len(self._layers)
        self._num_calls[index] += 1
        # Reentrant checkpointing turns gradients off in the first forward of a module, but not in the model's.
        return _Call(index, self._num_calls[index], is_counted=is_training or self._is_training_forward)

    def _alias_inputs(self, call: _Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with tensors replaced by aliases, whose gradients come from this module alone."""
        # A tensor's own gradient is the sum over all modules that use it. Only tensors in tuples are exchanged: the
        # module may be to change a list or a dict. Equal arguments stay equal, as attention compares them.
        aliases: dict[int, Tensor] = {}

        @unserializable_hook
        def left(gradient: Tensor) -> None:
            # A module that returns its input has one tensor for both, whose gradient comes from outside.
            where = "input gradient" if call.is_reached else "output gradient"
            self._look(call, where, gradient, counts=False)

        def alias(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(alias(one) for one in cast("tuple[Any, ...]", value))
            if not isinstance(value, Tensor) or not value.requires_grad or not value.is_floating_point():
                return value
            if id(value) not in aliases:
                aliases[id(value)] = seen = value[...]
                seen.register_hook(left)
            return aliases[id(value)]

        return alias(args), {name: alias(value) for name, value in kwargs.items()}

    def _look(
        self, call: _Call, where: Where, gradient: Tensor, *, counts: bool, parameter: str | None = None
    ) -> None:
        if self._is_closed:
            return
        dtype = gradient.dtype
        if parameter is not None and (half := self._dtypes.get(call.layer)) in _HALF:
            # In which a weight's gradient is computed, before it is cast to the weight's own dtype.
            dtype = half
        smallest = torch.finfo(dtype).tiny if counts and self._underflow else None
        event = self._id(call, where, dtype, parameter)
        self._counts.add_gradient(call.layer, gradient, event, smallest=smallest)

    def _id(self, call: _Call, where: Where, dtype: torch.dtype, parameter: str | None = None) -> int:
        event = _Event(call.layer, where, dtype, parameter, min(call.number, _MOST_CALLS))
        if event not in self._ids:
            self._ids[event] = len(self._events)
            self._events.append(event)
        return self._ids[event]

    def _find_own_first(self) -> NonFiniteValue | None:
        found = self._counts.first_event()
        if found is None:
            return None
        order, number = found
        event = self._events[number]
        layer = self._layers[event.layer]
        return NonFiniteValue(
            layer=layer.name,
            layer_type=type(layer.module).__name__,
            where=event.where,
            dtype=_short(event.dtype),
            parameter=event.parameter,
            parent=layer.parent,
            call=event.call,
            order=order,
        )


def watch_gradients(model: nn.Module, *, underflow: bool = True) -> GradientWatch:
    """Watch a model: count by layer which gradients underflow, and find the first value that is not finite.

    Example::

        with watch_gradients(model) as watch:
            ...  # some training steps
        print(watch.report())

    The watch counts the scaled gradients of each module's outputs and parameters, against the dtype that the module
    computes in, and the activations of training forwards; recomputed activations count once. The counts stay on the
    device, and no step waits for them; each step makes several passes over all activations. Hooks cannot see into
    modules compiled by torch.compile, which the report lists: watch the plain model. `close`, or the end of the
    block, removes the hooks.

    Args:
        model: The model, plain or prepared, on one device or several; under FSDP2 the sharded model.
        underflow: Whether to count underflow; otherwise the watch only finds the first value that is not finite.
    """
    return GradientWatch({"": model}, underflow=underflow)


class _Hook:
    """A module's hook, which a copy or pickle of the module leaves behind."""

    def __init__(self, call: Callable[..., Any], index: int) -> None:
        self._call = call
        self._index = index

    def __call__(self, *args: Any) -> Any:
        return self._call(self._index, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_do_nothing,)


def _do_nothing(*_: object) -> None:
    """Stand for the hook in a copy of a watched module."""


def _short(dtype: torch.dtype | None) -> str:
    return "?" if dtype is None else str(dtype).removeprefix("torch.")


def _gather(value: Any) -> list[Any]:
    """Gather a value of each rank if torch.distributed has a group. Called on all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
