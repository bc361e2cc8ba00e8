"""Trials of an optimizer on small tensors: does it step the parts of a layout in the same way as full tensors?

Torch steps each rank's shard of a parameter, and ZeRO each rank's part of a group laid end to end. Norms, factored
moments, blocks of quantised values and orthogonal updates then cover other elements than in a plain loop. An
optimizer's interface does not tell whether it uses these. A copy of the optimizer therefore steps small tensors in
both layouts, at learning rates that move them visibly, because a warm-up may begin at 0.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.compat import OPTIMIZER_HOOKS, is_compiler_imported

_SMALLEST_RATE = 0.05
_SMALLEST_RATE_IN_HALF = 1.0  # in half precision, where rounding hides smaller movements
# The difference that rounding allows, relative to the movement and to the largest value; and the least movement that
# counts as visible, as a multiple of the rounding of the largest value.
_LIMITS = {
    torch.float64: (1e-5, 1e-13, 30),  # with a state in fp32
    torch.float32: (1e-3, 1e-6, 30),
    torch.float16: (2e-2, 2e-3, 4),
    torch.bfloat16: (2e-2, 1.6e-2, 4),
}

Layout = Callable[
    [Sequence[Tensor]], list[Tensor]
]  # returns what is stepped in place of a group's full tensors
Moments = list[list[list[Tensor]]]  # [step][group][tensor]


class UnlikeError(Exception):
    """The error for layouts that give different values."""


class UnmovedError(Exception):
    """The error for a tensor that moves too little in either layout."""


class SmallTensor(NamedTuple):
    """A small tensor that stands for parameters: its value, and its gradient for each step."""

    value: Tensor
    gradients: list[Tensor]


def step_copy(
    optimizer: Optimizer,
    groups: Sequence[Sequence[SmallTensor]],
    lay_out: Layout,
    *,
    num_steps: int,
    step: Callable[[Any, list[list[nn.Parameter]]], None],
) -> Moments:
    """Step a copy of an optimizer on small tensors in a layout; return each group's tensors after each step."""
    parameters = [
        [nn.Parameter(one) for one in lay_out([small.value for small in group])] for group in groups
    ]
    copied = _copy_over(optimizer, parameters)
    found: Moments = []
    for index in range(num_steps):
        for own, group in zip(parameters, groups, strict=True):
            gradients = lay_out([small.gradients[index] for small in group])
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient
        step(copied, parameters)
        found.append([[parameter.detach().clone() for parameter in own] for own in parameters])
    return found


def check_alike(
    start: Sequence[Tensor], full: Sequence[Sequence[Tensor]], held: Sequence[Sequence[tuple[Tensor, Tensor]]]
) -> None:
    """Compare both layouts after each step; `held` pairs a part of each full tensor with the other layout's values.

    Raises:
        UnlikeError: A part differs by more than rounding.
        UnmovedError: The layouts agree, but the movements of a tensor are within rounding in all steps.
    """
    moved, before = [0.0] * len(start), start
    for now, pairs in zip(full, held, strict=True):
        for index, (old, new, (own, found)) in enumerate(zip(before, now, pairs, strict=True)):
            of_update, of_value, _ = _LIMITS.get(new.dtype, _LIMITS[torch.float32])
            distance = _largest(new - old)
            moved[index] = max(moved[index], distance)
            bound = of_update * distance + of_value * _largest(new)
            if not torch.allclose(found, own, rtol=0.0, atol=bound, equal_nan=True):
                apart = float((found - own).abs().max())
                raise UnlikeError(
                    f"a trial step on a tensor of shape {tuple(new.shape)} differs by {apart:.1e}; the update is "
                    f"{distance:.1e}"
                )
        before = now
    for new, distance in zip(before, moved, strict=True):
        _, of_value, visible = _LIMITS.get(new.dtype, _LIMITS[torch.float32])
        if not distance > visible * of_value * _largest(new):
            raise UnmovedError(f"one of shape {tuple(new.shape)} by {distance:.0e}")


def run_eagerly() -> AbstractContextManager[object]:
    """Run a compiled step in eager mode in the block, because to compile a step for each shape takes minutes.

    Does nothing unless the compiler is already imported: the import takes seconds, and a compiled step implies it.
    """
    return torch.compiler.set_stance("force_eager") if is_compiler_imported() else nullcontext()


def _largest(values: Tensor) -> float:
    """Return the largest magnitude; a value that is not finite counts as 0."""
    return float(values.abs().nan_to_num(posinf=0.0).max())


def _copy_over(optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> Any:
    """Return an optimizer of the same class and settings over small parameters, at learning rates that move visibly.

    A copy by torch would drop attributes other than groups and state. This copy leaves out hooks and the wrappers of
    a scheduler, which are bound to the original.
    """
    copied = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): copied}
    state = defaultdict[Any, Any](dict) if optimizer.state else deepcopy(optimizer.state)
    for group, small in zip(optimizer.param_groups, groups, strict=True):
        for index, parameter in enumerate(group["params"]):
            alike = [one for one in small if one.dim() == min(parameter.dim(), 4)] or small
            own = alike[min(index, len(alike) - 1)] if alike else parameter
            memo[id(parameter)] = own
            if alike and parameter in optimizer.state:
                state[own] = _small_state(optimizer.state[parameter], parameter, own)
        memo[id(group["params"])] = list(small)
        if "param_names" in group:
            memo[id(group["param_names"])] = [str(index) for index in range(len(small))]
    memo[id(optimizer.state)] = state
    held = {name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad")}
    for name, value in held.items():
        if name.startswith(OPTIMIZER_HOOKS) and isinstance(value, OrderedDict):
            memo[id(value)] = OrderedDict()
    vars(copied).update(deepcopy(held, memo))
    for group in copied.param_groups:
        _set_visible_rate(group)
    return copied


def _small_state(state: dict[str, Any], parameter: Tensor, small: Tensor) -> dict[str, Any]:
    """Return the state that an optimizer makes before its first step, in the shape of a small parameter."""
    return {
        key: torch.zeros_like(small)
        if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
        else deepcopy(value)
        for key, value in state.items()
    }


def _set_visible_rate(group: dict[str, Any]) -> None:
    """Raise a group's learning rate, unless the optimizer computes rates: then `lr` is no number or tensor."""
    rate, initial = group.get("lr"), group.get("initial_lr")
    if isinstance(rate, bool) or not isinstance(rate, (Real, Tensor)):
        return
    is_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in group["params"])
    sizes = [float(one) for one in (rate, initial) if isinstance(one, (Real, Tensor))]
    visible = max(_SMALLEST_RATE_IN_HALF if is_half else _SMALLEST_RATE, *sizes)
    group["lr"] = torch.full_like(rate, visible) if isinstance(rate, Tensor) else visible
