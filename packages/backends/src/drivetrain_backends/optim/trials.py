"""Trials of an optimizer on small parameters: a copy over them, visible learning rates and uncompiled steps."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.compat import OPTIMIZER_HOOKS, is_compiler_imported

_SMALLEST = 0.05
_SMALLEST_IN_HALF = 1.0  # in half precision, where rounding hides smaller movements


def copied_over(
    optimizer: Optimizer,
    groups: Sequence[Sequence[nn.Parameter]],
    small_parameters: Mapping[Tensor, nn.Parameter],
    state: Any,
) -> Any:
    """Return an optimizer of the same class and settings over small parameters, at learning rates that move visibly.

    Copying it in torch's own way would drop attributes other than its groups and state. Hooks are left out, and
    so are the wrappers of a scheduler, which are bound to the original.

    Args:
        optimizer: The user's optimizer; it is not changed.
        groups: The small parameters of each group.
        small_parameters: The small parameter in place of each of the optimizer's parameters.
        state: The state of the copy.
    """
    copied = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(parameter): small for parameter, small in small_parameters.items()}
    memo |= {id(optimizer): copied, id(optimizer.state): state}
    for group, small in zip(optimizer.param_groups, groups, strict=True):
        memo[id(group["params"])] = list(small)
        if "param_names" in group:
            memo[id(group["param_names"])] = [str(index) for index in range(len(small))]
    held = {name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad")}
    for name, value in held.items():
        if name.startswith(OPTIMIZER_HOOKS) and isinstance(value, OrderedDict):
            memo[id(value)] = OrderedDict()
    vars(copied).update(deepcopy(held, memo))
    set_visible_rates(copied.param_groups)
    return copied


def set_visible_rates(groups: Iterable[dict[str, Any]]) -> None:
    """Raise the learning rates of a copied optimizer's parameter groups to a size that moves visibly.

    A rate that is neither a number nor a tensor, such as the None of an optimizer that finds its own, is kept.
    """
    for group in groups:
        rate, initial = group.get("lr"), group.get("initial_lr")
        if isinstance(rate, bool) or not isinstance(rate, (Real, Tensor)):
            continue
        is_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in group["params"])
        sizes = [float(one) for one in (rate, initial) if isinstance(one, (Real, Tensor))]
        visible = max(_SMALLEST_IN_HALF if is_half else _SMALLEST, *sizes)
        group["lr"] = torch.full_like(rate, visible) if isinstance(rate, Tensor) else visible


def run_eagerly() -> AbstractContextManager[object]:
    """Run a compiled step in eager mode in the block, because compiling it for each shape takes minutes.

    Does nothing unless the compiler is imported: importing it takes seconds, and a compiled optimizer has done so.
    """
    return torch.compiler.set_stance("force_eager") if is_compiler_imported() else nullcontext()
