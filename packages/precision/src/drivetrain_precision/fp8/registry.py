"""Find recipes by name: ours and those of installed packages, registered under `drivetrain.fp8_recipes`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import torch

from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.protocol import Fp8Recipe
from drivetrain_precision.settings import PrecisionSettings
from drivetrain_precision.support import Support

ENTRY_POINT_GROUP = "drivetrain.fp8_recipes"
# torchao's before Transformer Engine's, which have not been run on a GPU by this project's tests yet; in each library
# accuracy before speed: scales of small blocks, then of rows, then of tensors.
_BEST_FIRST = (
    *("torchao_mxfp8", "torchao_rowwise", "torchao_tensorwise"),
    *("te_mxfp8", "te_block", "te_current", "te_delayed"),
)
# Emulation costs the less the simpler the scales are, and is there to try a program out.
_EMULATED_FIRST = ("torchao_tensorwise", "torchao_rowwise")
# The recipes of small blocks are near to each other, whatever library computes them.
_NEAREST: Mapping[str, str] = dict.fromkeys(("te_mxfp8", "te_nvfp4", "torchao_nvfp4"), "torchao_mxfp8")
_MEMBERS = tuple(sorted(name for name in vars(Fp8Recipe) if not name.startswith("_")))


@dataclass(frozen=True, slots=True)
class RecipeChoice:
    """The recipe of a run and the reason; without a recipe, the reason why the device or libraries allow none."""

    recipe: Fp8Recipe | None
    reason: str


def recipe_names() -> tuple[str, ...]:
    """Return the names of all recipes, sorted; nothing is imported."""
    return tuple(_points())


def _points() -> dict[str, EntryPoint]:
    """Return the entry points by name, sorted; to find them reads a file of each installed package."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(point.name, point)  # an environment may hold a package twice
    return dict(sorted(found.items()))


def check_recipe_name(name: str) -> None:
    """Raise PrecisionError, with all names, if no recipe has this name; "auto" is allowed."""
    if name != "auto":
        _check_is_known(name, _points())


def _check_is_known(name: str, points: Mapping[str, EntryPoint]) -> None:
    if name not in points:
        raise PrecisionError(f"fp8_recipe={name!r}: there is no such recipe; there are {', '.join(points)}")


def load_recipe(name: str) -> Fp8Recipe:
    """Return a recipe with its default options; PrecisionError, with all names, if no recipe has this name."""
    if name == "auto":
        raise PrecisionError(
            f"'auto' is a choice of settings, by device; the recipes are {', '.join(recipe_names())}"
        )
    points = _points()
    _check_is_known(name, points)
    return points[name].load()()


def as_recipe(given: object) -> Fp8Recipe:
    """Return the recipe for an object or a name; PrecisionError, with all names, for anything else."""
    if isinstance(given, str):
        return load_recipe(given)
    if all(hasattr(given, each) for each in _MEMBERS):
        if not isinstance(given, type):
            return cast("Fp8Recipe", given)
        hint = f"a class; give an object, such as {given.__name__}()"
    else:
        hint = "no recipe of fp8; give one, such as TorchaoRecipe(scaling='rowwise')"
    raise PrecisionError(
        f"{given!r} is {hint}, or a name, as to load_recipe('torchao_rowwise'): {', '.join(recipe_names())}"
    )


def choose_recipe(
    device: torch.device, settings: PrecisionSettings, given: Fp8Recipe | None = None
) -> RecipeChoice:
    """Choose the recipe of a run: `given` or the settings' recipe; PrecisionError if they contradict each other."""
    if given is not None:
        _check_agrees(given, settings)
    elif settings.fp8_recipe == "auto":
        supports = _supports(device)
        for name in _best_first(supports):
            return RecipeChoice(
                _apply_settings(load_recipe(name), settings), f"{name}: {supports[name].reason}"
            )
        shown = "; ".join(f"{name}: {support.reason}" for name, support in supports.items())
        return RecipeChoice(
            None, f"no recipe runs here ({shown}); train in bf16, or ask for fp8_fallback='bf16'"
        )
    recipe = given or _apply_settings(load_recipe(settings.fp8_recipe), settings)
    support = recipe.support(device)
    if support.level != "none":
        return RecipeChoice(recipe, f"{recipe.name}: {support.reason}")
    library = recipe.requirements.library
    able = _best_first(_supports(device))
    near = [name for name in able if name == _NEAREST.get(recipe.name)]
    near = near or [name for name in able if load_recipe(name).requirements.library == library] or able
    nearest = f"the nearest that runs here is {near[0]!r}" if near else "no other recipe runs here either"
    return RecipeChoice(
        None,
        f"recipe {recipe.name!r}: {support.reason}; {nearest}; fp8_fallback='bf16' trains in bf16 instead",
    )


def _supports(device: torch.device) -> dict[str, Support]:
    return {name: point.load()().support(device) for name, point in _points().items()}


def _best_first(supports: Mapping[str, Support]) -> list[str]:
    """Return the recipes that can run, the best first; recipes in hardware come before emulated recipes."""
    native = [name for name, support in supports.items() if support.level == "native"]
    emulated = [name for name, support in supports.items() if support.level == "emulated"]
    return [*_sort_names(native, _BEST_FIRST), *_sort_names(emulated, _EMULATED_FIRST)]


def _sort_names(names: Sequence[str], first: Sequence[str]) -> list[str]:
    """Return names sorted: first the names in `first`, in that order, then the others."""
    return [*(name for name in first if name in names), *(name for name in names if name not in first)]


def _check_agrees(given: Fp8Recipe, settings: PrecisionSettings) -> None:
    """Raise PrecisionError if the settings give a value that a recipe given in code would ignore."""
    if settings.fp8_recipe not in ("auto", given.name):
        raise PrecisionError(
            f"precision.fp8_recipe={settings.fp8_recipe!r}, and fp8_recipe={given.name!r} is given in code; say one"
        )
    said: list[tuple[str, str]] = []
    if settings.fp8_exclude:
        said.append((f"precision.fp8_exclude={settings.fp8_exclude!r}", f"exclude={settings.fp8_exclude!r}"))
    if not settings.fp8_skip_ends:
        said.append(("precision.fp8_skip_ends=False", "skip_first=False, skip_last=False"))
    if said:
        raise PrecisionError(
            f"{', '.join(setting for setting, _ in said)}: the recipe given in code has a filter of its own; say the "
            f"same by layers=LayerFilter({', '.join(same for _, same in said)}) of the recipe"
        )


def _apply_settings(recipe: Fp8Recipe, settings: PrecisionSettings) -> Fp8Recipe:
    """Return a recipe that also leaves out the layers that the settings leave out."""
    layers = replace(
        recipe.layers,
        exclude=(*recipe.layers.exclude, *settings.fp8_exclude),
        skip_first=settings.fp8_skip_ends,
        skip_last=settings.fp8_skip_ends,
    )
    options: dict[str, Any] = {"layers": layers}
    return replace(cast("Any", recipe), **options)
