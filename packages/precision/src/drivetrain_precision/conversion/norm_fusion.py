"""Decide which norms are computed by the linear layer that follows them: where nothing else can read their output."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from drivetrain_precision.conversion.converts_norms import NORMS, ConvertsNorms
from drivetrain_precision.conversion.layer_decision import LayerDecision


def plan_fusions(
    model: nn.Module, recipe: ConvertsNorms, decisions: Sequence[LayerDecision]
) -> tuple[LayerDecision, ...]:
    """Return decisions that name the pairs: norms and linear layers that are converted into one layer."""
    modules = dict(model.named_modules())
    places = Counter(each for _, each in model.named_modules(remove_duplicate=False))
    linear = {each.name for each in decisions if each.is_linear and each.converts}
    found: dict[str, LayerDecision] = {}
    for decision in decisions:
        norm = modules[decision.name]
        if not decision.converts or type(norm) not in NORMS:
            continue
        name, reader = _next(decision.name, modules)
        if not isinstance(reader, nn.Linear) or name not in linear:
            why = "no linear layer that is converted follows it in an nn.Sequential"
        elif places[norm] > 1 or places[reader] > 1:
            why = f"it or {name} is in several places of the model"
        else:
            why = recipe.fusion_refusal(norm, reader) or ""
        found[decision.name] = replace(decision, fused_with="" if why else name, unfused=why)
    readers = {each.fused_with: each.name for each in found.values() if each.fused_with}
    return tuple(
        replace(each, fused_with=readers[each.name]) if each.name in readers else found.get(each.name, each)
        for each in decisions
    )


def _next(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, nn.Module | None]:
    """Return the module that alone reads another one's output, and its name; None if that is not certain."""
    outer, _, own = name.rpartition(".")
    parent = modules[outer]
    # A subclass or a forward set on the object may call its children in another order.
    if not name or type(parent) is not nn.Sequential or "forward" in vars(parent):
        return "", None
    # With each child that is there twice, unlike named_children().
    inner = (child for child, _ in parent.named_modules(remove_duplicate=False))
    order = [child for child in inner if child and "." not in child]
    following = order[order.index(own) + 1 :][:1]
    if not following:
        return "", None
    return f"{outer}.{following[0]}".lstrip("."), parent.get_submodule(following[0])
