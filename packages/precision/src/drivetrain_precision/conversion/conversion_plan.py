"""Decide for each layer of a model whether a recipe converts it; nothing is changed yet."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from drivetrain_precision.conversion.layer_filter import LayerFilter


class Refuses(Protocol):
    """A recipe or a way to quantise, which knows the linear layers that it cannot convert."""

    def refusal(self, module: nn.Module) -> str | None:
        """Return why a linear layer cannot be converted, or None if it can."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDecision:
    """The decision about a module that has parameters of its own.

    Attributes:
        name: The module's first name in the model.
        kind: The name of its class.
        shape: The shape of its weight, (out_features, in_features) for a linear layer; empty without a weight.
        is_linear: Whether it is an nn.Linear or of a subclass.
        reason: The reason why it stays as it is; empty if it is converted.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    is_linear: bool
    reason: str = ""

    @property
    def converts(self) -> bool:
        """True if the module is converted."""
        return not self.reason


def plan_conversion(
    model: nn.Module, recipe: Refuses, layers: LayerFilter, *, kept: Collection[nn.Module] = ()
) -> tuple[LayerDecision, ...]:
    """Decide for each module with parameters of its own, in the order of the model.

    Args:
        model: The model.
        recipe: The recipe or scheme, which refuses layers that it cannot convert.
        layers: The layers to convert, among the others.
        kept: Modules that stay in fp32.

    Raises:
        PrecisionError: A pattern of the filter matches no linear layer.
    """
    modules = dict(model.named_modules())  # a shared one once, under its first name
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    layers.check(linear)
    adapters = set(_adapters(modules))
    inside = set(_inside(modules, layers))
    ties = _ties(modules)
    reasons: dict[str, str] = {}
    for name, module in modules.items():
        if not isinstance(module, nn.Linear):
            reasons[name] = f"is of class {type(module).__name__}, not nn.Linear"
        else:
            why = "stays in fp32 (keep_fp32)" if module in kept else _why_unfit(module)
            why = why or ("is a low-rank adapter" if name in adapters else None)
            why = why or layers.refusal(name, module, is_inside=name in inside)
            reasons[name] = why or _why_tied(name, ties) or recipe.refusal(module) or ""
    names = list(linear)
    for skips, at, place in ((layers.skip_first, 0, "first"), (layers.skip_last, -1, "last")):
        if skips and names and not reasons[names[at]]:
            reasons[names[at]] = f"is the {place} linear layer (skip_{place})"
    return tuple(
        LayerDecision(
            name=name,
            kind=type(module).__name__,
            shape=_shape(module),
            is_linear=name in linear,
            reason=reasons[name],
        )
        for name, module in modules.items()
        if any(True for _ in module.parameters(recurse=False))
    )


def _why_unfit(module: nn.Linear) -> str | None:
    """Return what about a linear layer no recipe could keep."""
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


def _adapters(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the names of what lies in an adapted layer beside the layer itself, as `peft` and its kin name it."""
    for name, module in modules.items():
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            prefix = f"{name}." if name else ""
            base = f"{prefix}base_layer"
            yield from (
                each
                for each in modules
                if each.startswith(prefix)
                and each != name
                and each != base
                and not each.startswith(f"{base}.")
            )


def _inside(modules: Mapping[str, nn.Module], layers: LayerFilter) -> Iterator[str]:
    for name, module in modules.items():
        if isinstance(module, layers.inside):
            prefix = f"{name}." if name else ""
            yield from (each for each in modules if each == name or each.startswith(prefix))


def _ties(modules: Mapping[str, nn.Module]) -> Mapping[str, str]:
    """Return for each parameter that several modules hold, by its full name, the names of the others."""
    holders: defaultdict[int, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for own, parameter in module.named_parameters(recurse=False):
            holders[id(parameter)].append(f"{name}.{own}" if name else own)
    return {
        one: ", ".join(other for other in names if other != one)
        for names in holders.values()
        if len(names) > 1
        for one in names
    }


def _why_tied(name: str, ties: Mapping[str, str]) -> str | None:
    others = ties.get(f"{name}.weight" if name else "weight")
    return None if others is None else f"shares its weight with {others}, which is used in full precision"


def _shape(module: nn.Module) -> tuple[int, ...]:
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()
