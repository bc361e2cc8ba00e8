"""Convert the layers of a model to a recipe, report on each layer, and restore the plain model."""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from drivetrain_precision.compat import unwrap_compiled
from drivetrain_precision.conversion.class_exchange import exchange_of
from drivetrain_precision.conversion.conversion_plan import plan_conversion
from drivetrain_precision.conversion.converts_norms import SupportsNormConversion
from drivetrain_precision.conversion.layer_changes import Change, change_layers
from drivetrain_precision.conversion.layer_filter import LayerFilter
from drivetrain_precision.conversion.layer_report import LayerDecision, LayerReport
from drivetrain_precision.conversion.library_check import check_library
from drivetrain_precision.errors import NothingConvertedError, PrecisionError
from drivetrain_precision.fp8.protocol import Fp8Recipe
from drivetrain_precision.fp8.registry import as_recipe
from drivetrain_precision.fp8.te_layers import is_te_linear

_ADVICE = "Give LayerFilter what to convert (skip_first=False, skip_last=False, other patterns)"
# torchao's own layers; without their import, by their names.
_OF_TORCHAO = ("Float8Linear", "MXFP8Linear", "NVFP4Linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport(LayerReport):
    """A report of the layers that compute in a recipe, with reasons for the others."""

    recipe: str

    def __str__(self) -> str:
        norms = [each for each in self.layers if each.converts and not each.is_linear]
        told = Counter(f"by itself: {each.unfused}" for each in norms if each.unfused)
        if fused := sum(bool(each.fused_with) for each in norms):
            told["with the linear layer after it"] = fused
        lines = (f"  {count:>5}  norm among them, computed {how}" for how, count in told.items())
        return "\n".join([self.counts(f"compute in {self.recipe}"), *lines])


def convert_model(
    model: nn.Module,
    recipe: Fp8Recipe | str,
    filter: LayerFilter | None = None,
    *,
    device: torch.device | None = None,
    kept: Mapping[nn.Module, str] = MappingProxyType({}),
    known: Collection[str] = (),
) -> ConversionReport:
    """Make a model's linear layers compute in a recipe, in place; also its norms if the recipe converts norms.

    Weights, their names and their optimizers stay unchanged: only the products change. Called on all ranks, before
    the model is prepared. The report has a line for every module that directly holds parameters.

    Args:
        model: The model; its layers must not be divided among ranks yet.
        recipe: The recipe that layers should compute in, or its name.
        filter: The layers to convert; None for the recipe's own filter.
        device: The device to compute on; None takes the device of the parameters or, if that is the CPU, this
            machine's accelerator.
        kept: Modules to leave unchanged, such as the result of `find_islands`, with reasons for the report.
        known: Names of linear layers of further models, which a pattern of the filter may match instead of this
            model's layers.

    Raises:
        NothingConvertedError: No layer can be converted, and no layer in `kept` is already converted. The model is
            unchanged.
        PrecisionError: A pattern matches nothing, there is no such recipe, the device or the libraries cannot run it,
            or a layer is already converted or rounds its weight by `prepare_qat`. The model is unchanged.
    """
    model, recipe = unwrap_compiled(model), as_recipe(recipe)
    found = list(_find_converted(model, recipe))
    if first := [name for name, module in found if module not in kept]:
        raise PrecisionError(
            f"{first[0] or type(model).__name__} is converted already; restore_model(model, recipe) first gives the "
            "plain layers back"
        )
    for name, module in model.named_modules():
        if (record := exchange_of(module)) is not None and record.owner == "qat":
            raise PrecisionError(
                f"{name or type(model).__name__} rounds its weight for quantised inference (prepare_qat), and one "
                "model trains either for that or in fp8: undo_qat(model) first gives the plain layers back, or train "
                "in bf16"
            )
    _check_support(model, recipe, device)
    decisions = plan_conversion(model, recipe, filter or recipe.layers, kept=kept, known=known)
    report = ConversionReport(recipe=recipe.name, layers=decisions)
    if not report.converted_linear and not found:
        free = plan_conversion(model, recipe, LayerFilter(skip_first=False, skip_last=False), kept=kept)
        helps = any(each.converts and each.is_linear for each in free)
        raise NothingConvertedError(
            f"recipe {recipe.name}: no layer of {type(model).__name__} can be converted: {report.refusals(model)}. "
            + (f"{_ADVICE}, or train in bf16" if helps else "No LayerFilter changes that: train in bf16")
        )
    change_layers(model, report.converted, _make_change(model, recipe, decisions), recipe.restore)
    return report


def restore_model(
    model: nn.Module, recipe: Fp8Recipe | str, *, kept: Container[nn.Module] = ()
) -> tuple[str, ...]:
    """Restore a model's plain layers in place, with equal weights, and return the names of the restored layers.

    Modules in `kept`, such as those shared with another model, stay converted.
    """
    recipe = as_recipe(recipe)
    names = tuple(name for name, module in _find_converted(model, recipe) if module not in kept)
    change_layers(unwrap_compiled(model), names, recipe.restore, recipe.convert)
    return names


def recipe_state(model: nn.Module, recipe: Fp8Recipe | str) -> dict[str, Tensor]:
    """Return the tensors that converted layers keep besides weights, by layer and name, for a checkpoint."""
    recipe = as_recipe(recipe)
    return {
        f"{name}.{key}" if name else key: value
        for name, module in _find_converted(model, recipe)
        for key, value in recipe.state(module).items()
    }


def load_recipe_state(
    model: nn.Module, recipe: Fp8Recipe | str, state: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Load the tensors that `recipe_state` returned, and return the names that the state lacks.

    A checkpoint of another recipe lacks all names; the layers then begin as if they were new.

    Raises:
        PrecisionError: A saved tensor has another shape than in this recipe; nothing was loaded.
    """
    recipe = as_recipe(recipe)
    live = recipe_state(model, recipe)
    for name, value in live.items():
        if name in state and state[name].shape != value.shape:
            raise PrecisionError(
                f"recipe {recipe.name}: {name} was saved in the shape {tuple(state[name].shape)}, and this recipe "
                f"keeps it in the shape {tuple(value.shape)}: give the recipe the options that it was saved with, "
                "such as the length of its history"
            )
    for name, value in live.items():
        if name in state:
            value.copy_(state[name])
    return tuple(name for name in live if name not in state)


def _make_change(model: nn.Module, recipe: Fp8Recipe, decisions: Iterable[LayerDecision]) -> Change:
    """Return the function that converts a layer. A layer fused with a norm must be converted after the norm."""
    norms = {
        model.get_submodule(each.name): each.fused_with
        for each in decisions
        if each.is_linear and each.fused_with
    }

    def change(module: nn.Module) -> nn.Module:
        if module in norms and isinstance(module, nn.Linear) and isinstance(recipe, SupportsNormConversion):
            return recipe.fuse(model.get_submodule(norms[module]), module)
        return recipe.convert(module)

    return change


def _check_support(model: nn.Module, recipe: Fp8Recipe, device: torch.device | None) -> None:
    """Check that the given device, the model's or this machine's accelerator can run a recipe."""
    kinds = {each.device.type: each.device for each in model.parameters() if not each.is_meta}
    devices = list(kinds.values()) if device is None else [device]
    supports = {each: recipe.support(each) for each in devices}
    moved = torch.accelerator.current_accelerator(check_available=True)
    for each, support in supports.items():
        if device is None and each.type == "cpu" and moved is not None and support.level == "none":
            support = recipe.support(moved)
        if support.level == "none":
            raise PrecisionError(f"recipe {recipe.name}: {support.reason}")
    if not devices and (missing := check_library(recipe.requirements)) is not None:
        raise PrecisionError(f"recipe {recipe.name}: {missing}")


def _find_converted(model: nn.Module, recipe: Fp8Recipe) -> Iterator[tuple[str, nn.Module]]:
    modules = unwrap_compiled(model).named_modules()
    return ((name, each) for name, each in modules if recipe.is_converted(each))


def converted_by(module: nn.Module) -> str | None:
    """Return the library or recipe that converted a layer to fp8, in words; None for other modules."""
    record = exchange_of(module)
    if record is not None:
        return f"{record.recipe} by convert_model" if record.owner == "fp8" else None
    if is_te_linear(module):
        return "Transformer Engine by convert_model"
    own = (each for each in type(module).__mro__ if each.__module__.startswith("torchao."))
    return next((f"{each.__name__} by torchao itself" for each in own if each.__name__ in _OF_TORCHAO), None)


def describe_converted(models: Iterable[nn.Module]) -> str | None:
    """Describe how many linear layers of models compute in fp8 and what converted them; None without such layers."""
    modules = {each for model in models for each in unwrap_compiled(model).modules()}
    owners = Counter(filter(None, map(converted_by, modules)))
    if not owners:
        return None
    linear = sum(isinstance(each, nn.Linear) or is_te_linear(each) for each in modules)
    shown = ", ".join(f"{count} in {owner}" for owner, count in sorted(owners.items()))
    return f"{owners.total()} of {linear} linear layers, converted before prepare(): {shown}"
