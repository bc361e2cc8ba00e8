"""Convert the linear layers of a model to a recipe, report on each, and give the plain model back."""

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

from drivetrain_precision.compat import unwrap_compiled
from drivetrain_precision.conversion.class_exchange import exchange_of
from drivetrain_precision.conversion.conversion_plan import plan_conversion
from drivetrain_precision.conversion.layer_changes import change_layers
from drivetrain_precision.conversion.layer_filter import LayerFilter
from drivetrain_precision.conversion.layer_report import LayerReport
from drivetrain_precision.conversion.library_check import check_library
from drivetrain_precision.errors import NothingConvertedError, PrecisionError
from drivetrain_precision.fp8.protocol import Fp8Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport(LayerReport):
    """A report of which layers compute in a recipe now, and why the others do not.

    Attributes:
        recipe: The name of the recipe.
    """

    recipe: str

    def __str__(self) -> str:
        return self.counts(f"compute in {self.recipe}")


def convert_model(
    model: nn.Module,
    recipe: Fp8Recipe,
    filter: LayerFilter | None = None,
    *,
    kept: Mapping[nn.Module, str] = MappingProxyType({}),
    known: Collection[str] = (),
) -> ConversionReport:
    """Let the linear layers of a model compute in a recipe, in place.

    Weights, their names and their optimizers stay as they are: only the products change. Called on all ranks, before
    the model is prepared.

    Args:
        model: The model; its layers are not divided among ranks yet.
        recipe: The recipe that layers are to compute in.
        filter: The layers to convert; None for the recipe's own filter.
        kept: Modules that stay as they are whatever the filter says, such as those that `find_islands` returns or
            those that another model shares and that are converted already, each with the reason for the report.
        known: Names of linear layers of further models, which a pattern of the filter may match in place of this
            model's.

    Returns:
        The report of every module with parameters of its own.

    Raises:
        NothingConvertedError: No layer can be converted, and none that is kept is converted already. The model is
            left as it was.
        PrecisionError: A pattern matches nothing, the recipe's library is missing, or a layer is converted already or
            rounds its weight by `prepare_qat`. The model is left as it was.
    """
    model = unwrap_compiled(model)
    found = list(_converted(model, recipe))
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
    if (missing := check_library(recipe.requirements)) is not None:
        raise PrecisionError(f"recipe {recipe.name}: {missing}")
    decisions = plan_conversion(model, recipe, filter or recipe.layers, kept=kept, known=known)
    report = ConversionReport(recipe=recipe.name, layers=decisions)
    if not report.converted and not found:
        raise NothingConvertedError(
            f"recipe {recipe.name}: no layer of {type(model).__name__} can be converted: "
            f"{report.refusals(model)}. Give LayerFilter what to convert (skip_first=False, "
            "skip_last=False, other patterns), or train in bf16"
        )
    change_layers(model, report.converted, recipe.convert, recipe.restore)
    return report


def restore_model(model: nn.Module, recipe: Fp8Recipe, *, kept: Container[nn.Module] = ()) -> tuple[str, ...]:
    """Give a model its plain linear layers back, in place, with equal weights.

    Args:
        model: The model.
        recipe: The recipe that layers compute in.
        kept: Modules that stay converted, such as those that another model shares.

    Returns:
        The names of the layers that were converted.
    """
    names = tuple(name for name, module in _converted(model, recipe) if module not in kept)
    change_layers(unwrap_compiled(model), names, recipe.restore, recipe.convert)
    return names


def recipe_state(model: nn.Module, recipe: Fp8Recipe) -> dict[str, Tensor]:
    """Return what converted layers keep beside their weights, by layer and name, for a checkpoint."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in _converted(model, recipe)
        for key, value in recipe.state(module).items()
    }


def load_recipe_state(model: nn.Module, recipe: Fp8Recipe, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Load what `recipe_state` returned.

    Returns:
        The names that this recipe keeps and the state does not have: a checkpoint of another recipe has none of them,
        and the layers begin as if they were new.

    Raises:
        PrecisionError: A tensor was saved in another shape than this recipe keeps; nothing was loaded.
    """
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


def _converted(model: nn.Module, recipe: Fp8Recipe) -> Iterator[tuple[str, nn.Module]]:
    modules = unwrap_compiled(model).named_modules()
    return ((name, each) for name, each in modules if recipe.is_converted(each))
