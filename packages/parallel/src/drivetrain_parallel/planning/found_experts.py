"""The experts of a model: modules that stack them, found by signature and sizes and tried before they are taken."""

import inspect
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn

from drivetrain_parallel.plan import AttributeChange, Cut, LayerPlan, ParallelPlan
from drivetrain_parallel.planning.found_styles import joined, make_of
from drivetrain_parallel.planning.trial import Trial

_FEW = 3  # experts that are tried, on two ranks: all compute alike, and may be large
_NOT_HELD = "its experts, divided, compute something else than its forward of all"
_CONTRACT = "a module of experts has parameters of shape (experts, ...) and forward(tokens, indices, weights)"


def find_experts(model: nn.Module, size: int) -> ParallelPlan:
    """Return the plan of a model's experts among `size` ranks, and what is left that seems to hold some."""
    found = ParallelPlan(size=size)
    left: dict[str, str] = {}
    tried: dict[object, bool | None] = {}
    for name, module in model.named_modules():
        number = _num_stacked(module)
        if number is None or _num_arguments(module) != 3:
            if _seems_to_hold_experts(name, module):
                left[name] = _explain(module, number)
        elif number < size:
            left[name] = f"it has {number} experts, fewer than the {size} ranks"
        else:
            make = make_of(module)
            if make not in tried:
                tried[make] = _try(module, number)
            if (draws := tried[make]) is None:
                left[name] = _NOT_HELD
            else:
                random = frozenset({name}) if draws else frozenset[str]()
                found = joined(found, replace(_plan(name, module, number, size), random=random))
    names = [*(layer.name for layer in found.layers), *left]
    innermost = {
        outer: reason
        for outer, reason in left.items()
        if not any(name.startswith(f"{outer}.".lstrip(".")) and name != outer for name in names)
    }
    return replace(found, sources={layer.name: "found" for layer in found.layers}, left=innermost)


def _num_stacked(module: nn.Module) -> int | None:
    """Return the number of experts that the parameters of a module stack; None if it is no such module."""
    parameters = list(module.parameters(recurse=False))
    sizes = {p.shape[0] if p.dim() else 0 for p in module.parameters()}
    are_plain = all(type(p) is nn.Parameter and p.is_floating_point() for p in module.parameters())
    if not are_plain or len(parameters) < len(list(module.parameters())) or len(sizes) != 1:
        return None
    return sizes.pop() if any(p.dim() == 3 for p in parameters) else None


def _num_arguments(module: nn.Module) -> int:
    """Return the number of arguments that a module's forward takes; -1 for any number."""
    kinds = [one.kind for one in list(inspect.signature(type(module).forward).parameters.values())[1:]]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(kinds) if all(kind in positional for kind in kinds) else -1


def _seems_to_hold_experts(name: str, module: nn.Module) -> bool:
    """Return whether a module is called experts, of which each token chooses some."""
    called = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    return "experts" in called and "shared" not in called and any(True for _ in module.parameters())


def _explain(module: nn.Module, number: int | None) -> str:
    if number is not None:
        return f"its forward does not take tokens, indices and weights; {_CONTRACT}"
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return f"its experts are modules of a list; {_CONTRACT}"
    return (
        f"its parameters do not all stack experts along their first dimension, in floating point; {_CONTRACT}"
    )


def _plan(name: str, module: nn.Module, number: int, size: int) -> ParallelPlan:
    """Return the plan of a module with a number of experts."""
    cut = Cut(dim=0, pieces=(number,), num_units=number)
    cuts = {attribute: cut for attribute, _ in module.named_parameters()}
    numbers = [key for key, value in vars(module).items() if "expert" in key and type(value) is int]
    changes = (
        AttributeChange(module=name, attribute=key, whole=number, num_units=number, region=name)
        for key in numbers
        if getattr(module, key) == number and "per_tok" not in key
    )
    layer = LayerPlan(name=name, style="experts", region=name, cuts=cuts)
    return ParallelPlan(size=size, layers=(layer,), attributes=tuple(changes))


def _try(module: nn.Module, number: int) -> bool | None:
    """Return whether a module's experts draw random numbers; None if some, on two ranks, compute something else."""
    few = min(number, _FEW)
    plan = _plan("", module, number, 2)
    fewer = {
        id(p): nn.Parameter(torch.empty(few, *p.shape[1:], device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    copied = deepcopy(module, fewer)  # which takes them for copies
    for change in plan.attributes:
        setattr(copied, change.attribute, few)
    index = torch.arange(20).remainder(few).view(10, 2)
    weights = torch.linspace(0.1, 1, 20).view(10, 2)
    stacked = [p for p in module.parameters() if p.dim() == 3]
    for width in dict.fromkeys([p.shape[dim] for dim in (2, 1) for p in stacked]):
        trial = Trial(copied, width, (index, weights))
        if trial.is_possible:
            return trial.draws if trial.settled(_plan("", copied, few, 2)) is not None else None
    return None
