"""Decide for each layer of a model whether a recipe converts the layer, without changing the model."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

from torch import Tensor, nn

from drivetrain_precision.conversion.converts_norms import NORMS, SupportsNormConversion
from drivetrain_precision.conversion.layer_filter import LayerFilter
from drivetrain_precision.conversion.layer_report import LayerDecision

# The modules of a wrapper of `peft` that keeps a module and trains a copy in its place (`modules_to_save`).
_COPIES = ("original_module", "modules_to_save")


class SupportsRefusal(Protocol):
    """A recipe or a quantization that can refuse linear layers."""

    def refusal(self, module: nn.Module) -> str | None:
        """Return why a linear layer cannot be converted, or None if it can."""
        ...


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts that decisions need: a model's modules by name, and reasons to leave modules unchanged."""

    modules: Mapping[str, nn.Module]
    kept: Mapping[nn.Module, str]
    ties: Mapping[str, str]
    ends: Mapping[str, str]


def plan_conversion(
    model: nn.Module,
    recipe: SupportsRefusal,
    layers: LayerFilter,
    *,
    kept: Mapping[nn.Module, str] = MappingProxyType({}),
    known: Collection[str] = (),
) -> tuple[LayerDecision, ...]:
    """Decide for each module that directly holds parameters whether to convert it, in the model's order.

    Modules in `kept` stay unchanged, with the given reason. A pattern of the filter may match one of the `known`
    layers of further models. PrecisionError if a pattern matches no linear layer.
    """
    modules = dict(model.named_modules())  # a shared one once, under its first name
    linear = linear_names(model)
    norms = [name for name, module in modules.items() if _converts_norm(recipe, module)]
    layers.check([*linear, *norms, *known])
    bases = [name for name in linear if not _is_adapter(name, modules)]
    facts = _Facts(modules, kept, _explain_ties(modules), _explain_ends(bases, modules, layers))
    decisions = tuple(
        LayerDecision(
            name=name,
            kind=type(module).__name__,
            shape=tuple(weight.shape)
            if isinstance(weight := getattr(module, "weight", None), Tensor)
            else (),
            is_linear=isinstance(module, nn.Linear),
            reason=_find_reason(name, recipe, layers, facts),
        )
        for name, module in modules.items()
        if any(True for _ in module.parameters(recurse=False))
    )
    if isinstance(recipe, SupportsNormConversion) and recipe.norms == "fuse":
        return _plan_fusions(model, recipe, decisions)
    return decisions


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of a model's linear layers, in its order."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _find_reason(name: str, recipe: SupportsRefusal, layers: LayerFilter, facts: _Facts) -> str:
    """Return the first reason why a module stays unchanged; empty if it is converted."""
    module = facts.modules[name]
    if module in facts.kept:
        return facts.kept[module]
    converts_norm = _converts_norm(recipe, module)
    if not isinstance(module, nn.Linear) and not converts_norm:
        if type(module) in NORMS and isinstance(recipe, SupportsNormConversion):
            return f"is a {type(module).__name__}, and norms='keep'"
        return f"is of class {type(module).__name__}, not nn.Linear"
    if _is_adapter(name, facts.modules):
        return "is a low-rank adapter"
    is_inside = any(isinstance(facts.modules[outer], layers.inside) for outer in _lineage(name))
    return (
        (_why_unfit(module) if isinstance(module, nn.Linear) else None)
        or layers.refusal(name, module, is_inside=is_inside)
        or facts.ties.get(f"{name}.weight".lstrip("."))
        or recipe.refusal(module)
        or facts.ends.get(name, "")
    )


def _converts_norm(recipe: SupportsRefusal, module: nn.Module) -> bool:
    return type(module) in NORMS and isinstance(recipe, SupportsNormConversion) and recipe.norms != "keep"


def _why_unfit(module: nn.Linear) -> str | None:
    """Return why no recipe can convert a linear layer, such as a custom forward; None without such a reason."""
    kind, weight = type(module), module.weight
    if kind is not nn.Linear:
        return f"is of class {kind.__module__}.{kind.__name__}, which has a forward of its own"
    if "forward" in vars(module):
        return "has a forward of its own, set on the object"
    if type(weight.data) is not Tensor:
        return (
            f"holds a {type(weight.data).__name__} as its weight: quantised, or divided among ranks already"
        )
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return f"holds its weight in {weight.dtype}"
    return None


def _explain_ends(
    names: Sequence[str], modules: Mapping[str, nn.Module], layers: LayerFilter
) -> dict[str, str]:
    """Return the reasons to leave a model's first and last linear layers unchanged."""
    # A layer and the copy that `peft` trains of it are in one place.
    places = {
        name: next(
            (
                outer
                for outer in _lineage(name)
                if all(f"{outer}.{each}".lstrip(".") in modules for each in _COPIES)
            ),
            name,
        )
        for name in names
    }
    order = list(places.values())
    first = order[0] if layers.skip_first and order else None
    last = order[-1] if layers.skip_last and order else None
    reasons = {last: "is the last linear layer (skip_last)", first: "is the first linear layer (skip_first)"}
    return {name: reasons[place] for name, place in places.items() if place in reasons}


def _is_adapter(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a module is an adapter of a layer, by the names that `peft` and similar libraries use."""
    steps = [modules[each] for each in _lineage(name)]
    bases = (getattr(outer, "base_layer", None) for outer in steps)
    return any(
        isinstance(base, nn.Module) and inner is not base
        for base, inner in zip(bases, steps[1:], strict=False)
    )


def _lineage(name: str) -> list[str]:
    """Return the names of all modules that contain a module, from the model down, and the module's name."""
    return ["", *accumulate(name.split("."), "{}.{}".format)] if name else [""]


def _explain_ties(modules: Mapping[str, nn.Module]) -> Mapping[str, str]:
    """Return the reason to leave a layer unchanged for each parameter that several modules hold, by full name."""
    holders: defaultdict[int, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for own, parameter in module.named_parameters(recurse=False):
            holders[id(parameter)].append(f"{name}.{own}" if name else own)
    return {
        one: f"shares its weight with {', '.join(each for each in names if each != one)}, which is used in full "
        "precision"
        for names in holders.values()
        if len(names) > 1
        for one in names
    }


def _plan_fusions(
    model: nn.Module, recipe: SupportsNormConversion, decisions: Sequence[LayerDecision]
) -> tuple[LayerDecision, ...]:
    """Return the decisions with pairs marked: a norm and a linear layer that become one layer."""
    modules = dict(model.named_modules())
    places = Counter(each for _, each in model.named_modules(remove_duplicate=False))
    linear = {each.name for each in decisions if each.is_linear and each.converts}
    found: dict[str, LayerDecision] = {}
    for decision in decisions:
        norm = modules[decision.name]
        if not decision.converts or type(norm) not in NORMS:
            continue
        name, reader = _find_reader(decision.name, modules)
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


def _find_reader(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, nn.Module | None]:
    """Return the name and module of the only reader of a module's output; None if that is uncertain."""
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
