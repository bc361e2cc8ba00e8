"""A trial of an optimizer on small tensors: does it step the parts of a layout in the same way as full tensors?

Torch steps each rank's shard of a parameter, and ZeRO each rank's part of a group laid end to end. Norms, factored
moments, blocks of quantised values and orthogonal updates then cover other elements than in a plain loop. An
optimizer's interface does not tell whether it uses these. A copy of the optimizer therefore steps small tensors in
both layouts, at learning rates that move them visibly, because a warm-up may begin at 0.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
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

# Elementwise, as a test checks; exactly these classes, because a subclass may do more.
KNOWN_ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad),
    *(optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)

StandIn = tuple[tuple[int, ...], torch.dtype]  # the shape and dtype of a small tensor
# Of a group: the values of its small tensors, then their gradients for each step.
Rows = Sequence[Sequence[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout(ABC):
    """The parts of parameters that a backend's optimizers step, and the words that refuse an optimizer."""

    device: torch.device
    num_steps: int
    num_ranks: int = 1  # the number of ranks whose parts this process steps in turn
    widest: torch.dtype | None = None  # tried first, in place of the dtypes of `stand_ins`
    scales: tuple[float, ...] = (1.0,)  # the sizes of gradients, for one small tensor after the other
    refused: str  # what the optimizer cannot do, after its name
    unlike: str  # how its step differs
    advice: str  # what to do about it, in whole sentences
    error: type[ValueError] = ValueError

    @abstractmethod
    def stand_ins(self, parameters: Sequence[Tensor]) -> list[StandIn]:
        """Return the small tensors that stand for the parameters of a group."""

    @abstractmethod
    def divide(self, values: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Return a rank's parts of the full tensors of a group."""

    @abstractmethod
    def step(self, optimizer: Optimizer, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        """Step an optimizer over the parts of each group, as the backend does."""

    @abstractmethod
    def pair(self, full: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Pair values of each full tensor of a group with the same values in the parts, which are given by rank."""

    @abstractmethod
    def gather(self, told: str) -> Sequence[str]:
        """Gather a text from all ranks. Called on all ranks."""


def check_alike(optimizer: Optimizer, layout: ParameterLayout, *, verdict: str | None = None) -> None:
    """Refuse an optimizer whose step on the parts of a layout differs from its step on full tensors.

    The optimizer and the random generators stay unchanged. Called on all ranks, which refuse together.

    Args:
        optimizer: The optimizer. A copy with the same options takes the steps.
        layout: The layout of the parts.
        verdict: The outcome if it is known without a trial: a reason to refuse, or "" to allow.

    Raises:
        ValueError: The steps differ, fail, or move too little to tell; the layout chooses the class.
    """
    raised, found = None, verdict
    if found is None:
        try:
            # To compile a compiled step for each shape takes minutes; to import the compiler takes seconds.
            eager = torch.compiler.set_stance("force_eager") if is_compiler_imported() else nullcontext()
            with eager, torch.enable_grad():
                found = _compare(optimizer, layout)
        except Exception as error:  # noqa: BLE001 whatever the optimizer answers with; raised on all ranks below
            if layout.widest is not None:
                check_alike(optimizer, replace(layout, widest=None))
                return
            raised, first = error, (str(error).splitlines() or [""])[0]
            found = f"tried on small tensors, and failed: {type(error).__name__}: {first[:120]}"
    refusal = found and f"{type(optimizer).__name__} {layout.refused}: {found}. {layout.advice}"
    rank = dist.get_rank() if dist.is_initialized() else 0
    told = layout.gather(refusal and f"{refusal} (of rank {rank}'s optimizer)")
    if any(told):
        raise layout.error(refusal or next(filter(None, told))) from raised


def _compare(optimizer: Optimizer, layout: ParameterLayout) -> str:
    """Return how an optimizer's steps on parts differ from those on full tensors; "" if they are alike."""
    made, scales = torch.Generator().manual_seed(0), cycle(layout.scales)
    groups: list[Rows] = []
    for group in optimizer.param_groups:
        stand_ins = [(shape, layout.widest or own) for shape, own in layout.stand_ins(group["params"])]
        small = [_make_small(one, next(scales), layout.num_steps, made) for one in stand_ins]
        groups.append([[rows[index] for rows in small] for index in range(1 + layout.num_steps)])
    run = partial(_step_copy, optimizer, groups, layout)
    full = run(
        lambda values: [value.clone().to(layout.device) for value in values], lambda own, _: own.step()
    )
    by_rank = [run(partial(layout.divide, rank=rank), layout.step) for rank in range(layout.num_ranks)]
    start = [value.to(layout.device) for values, *_ in groups for value in values]
    moved, before = [0.0] * len(start), start
    for whole, *parts in zip(full, *by_rank, strict=True):
        now = [tensor for group in whole for tensor in group]
        pairs = [pair for group, *own in zip(whole, *parts, strict=True) for pair in layout.pair(group, own)]
        for old, new, (expected, found) in zip(before, now, pairs, strict=True):
            of_update, of_value, _ = _LIMITS.get(new.dtype, _LIMITS[torch.float32])
            update = _largest(new - old)
            bound = of_update * update + of_value * _largest(new)
            if not torch.allclose(found, expected, rtol=0.0, atol=bound, equal_nan=True):
                apart = float((found - expected).abs().max())
                return (
                    f"{layout.unlike} (a trial step on a tensor of shape {tuple(new.shape)} differs by {apart:.1e}; "
                    f"the update is {update:.1e})"
                )
        moved = [max(far, _largest(new - old)) for far, new, old in zip(moved, now, start, strict=True)]
        before = now
    for new, distance in zip(before, moved, strict=True):
        _, of_value, visible = _LIMITS.get(new.dtype, _LIMITS[torch.float32])
        if not distance > visible * of_value * _largest(new):
            return (
                f"tried on small tensors, it moved one of shape {tuple(new.shape)} by {distance:.0e} in "
                f"{layout.num_steps} steps, which is too little to tell"
            )
    return ""


def _make_small(stand_in: StandIn, scale: float, num_steps: int, made: torch.Generator) -> list[Tensor]:
    """Return random values and a gradient for each step: large ones in the third step, half zeros in the fourth."""
    shape, dtype = stand_in
    value = torch.randn(shape, generator=made)
    # Scaled by position, so that the norm of a part differs from that of the full gradient.
    slope = scale * torch.linspace(0.1, 2.0, value.numel()).reshape(shape)
    gradients = [torch.randn(shape, generator=made) * slope for _ in range(num_steps)]
    for large in gradients[2:3]:
        large *= 100
    for sparse in gradients[3:4]:
        sparse *= torch.rand(shape, generator=made) < 0.5
    return [one.to(dtype) for one in (value, *gradients)]


def _step_copy(
    optimizer: Optimizer,
    groups: Sequence[Rows],
    layout: ParameterLayout,
    lay_out: Callable[[Sequence[Tensor]], list[Tensor]],
    step: Callable[[Any, list[list[nn.Parameter]]], None],
) -> list[list[list[Tensor]]]:
    """Step a copy of an optimizer on small tensors; return each group's tensors after each step.

    Each copy begins with the same random numbers.
    """
    parameters = [[nn.Parameter(one) for one in lay_out(values)] for values, *_ in groups]
    copied = _copy_over(optimizer, parameters)
    found: list[list[list[Tensor]]] = []
    kind = layout.device.type
    with torch.random.fork_rng(devices=[] if kind == "cpu" else [layout.device], device_type=kind):
        for index in range(layout.num_steps):
            for own, (_, *gradients) in zip(parameters, groups, strict=True):
                for parameter, gradient in zip(own, lay_out(gradients[index]), strict=True):
                    parameter.grad = gradient
            step(copied, parameters)
            found.append([[parameter.detach().clone() for parameter in own] for own in parameters])
    return found


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
