"""Convert the linear layers of a model to a recipe, report on each, and give the plain model back."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from drivetrain_precision.errors import NothingConvertedError, PrecisionError
from drivetrain_precision.fp8.conversion_plan import LayerDecision, plan_conversion
from drivetrain_precision.fp8.hardware_check import check_library
from drivetrain_precision.fp8.layer_filter import LayerFilter
from drivetrain_precision.fp8.protocol import Fp8Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """A report of what a conversion did with each module that has parameters of its own.

    Attributes:
        recipe: The name of the recipe.
        layers: A decision for each module, in the order of the model.
    """

    recipe: str
    layers: tuple[LayerDecision, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """The names of the layers that compute in the recipe now."""
        return tuple(each.name for each in self.layers if each.converts)

    def __str__(self) -> str:
        reasons = Counter(each.reason for each in self.layers if not each.converts)
        total = len(self.layers)
        lines = [f"{len(self.converted)} of {total} layers compute in {self.recipe}; the others:"]
        return "\n".join([*lines, *(f"  {count:>5}  {reason}" for reason, count in reasons.most_common())])


def convert_model(
    model: nn.Module,
    recipe: Fp8Recipe,
    filter: LayerFilter | None = None,
    *,
    kept: Collection[nn.Module] = (),
) -> ConversionReport:
    """Let the linear layers of a model compute in a recipe, in place.

    Weights, their names and their optimizers stay as they are: only the products change. Called on all ranks, before
    the model is prepared.

    Args:
        model: The model; its layers are not divided among ranks yet.
        recipe: The recipe that layers are to compute in.
        filter: The layers to convert; None for the recipe's own filter.
        kept: Modules that stay as they are whatever the filter says, such as those that `find_islands` returns.

    Returns:
        The report of every module with parameters of its own.

    Raises:
        NothingConvertedError: No layer can be converted. The model is left as it was.
        PrecisionError: A pattern matches nothing, the recipe's library is missing, or a layer is converted already.
            The model is left as it was.
    """
    if (first := next(_converted(model, recipe), None)) is not None:
        raise PrecisionError(
            f"{first[0] or type(model).__name__} is converted already; restore_model(model, recipe) first gives the "
            "plain layers back"
        )
    if (missing := check_library(recipe.requirements)) is not None:
        raise PrecisionError(f"recipe {recipe.name}: {missing}")
    decisions = plan_conversion(model, recipe, filter or recipe.layers, kept=kept)
    report = ConversionReport(recipe=recipe.name, layers=decisions)
    if not report.converted:
        raise NothingConvertedError(_nothing(model, report))
    for name in report.converted:
        _replace(model, name, recipe.convert)
    return report


def restore_model(model: nn.Module, recipe: Fp8Recipe) -> tuple[str, ...]:
    """Give a model its plain linear layers back, in place, with equal weights.

    Returns:
        The names of the layers that were converted.
    """
    names = tuple(name for name, _ in _converted(model, recipe))
    for name in names:
        _replace(model, name, recipe.restore)
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
    return ((name, each) for name, each in model.named_modules() if recipe.is_converted(each))


def _replace(model: nn.Module, name: str, change: Callable[[nn.Module], nn.Module]) -> None:
    """Change a module, and put the result into every place of the model that holds it."""
    old = model.get_submodule(name)
    new = change(old)
    if new is old:
        return
    if old is model:
        raise PrecisionError(
            f"the model is a single {type(old).__name__}, which this recipe exchanges for another module: put it "
            "into an nn.Sequential"
        )
    for parent in model.modules():
        for place, child in parent.named_children():
            if child is old:
                setattr(parent, place, new)


def _nothing(model: nn.Module, report: ConversionReport) -> str:
    linear = [each for each in report.layers if each.is_linear]
    shown = "; ".join(f"{each.name or type(model).__name__} {each.reason}" for each in linear[:8])
    more = f"; and {len(linear) - 8} more" if len(linear) > 8 else ""
    return (
        f"recipe {report.recipe}: no layer of {type(model).__name__} can be converted: "
        f"{shown or 'it has no nn.Linear'}{more}. Give LayerFilter what to convert (skip_first=False, "
        "skip_last=False, other patterns), or train in bf16"
    )
