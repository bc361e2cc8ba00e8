"""Find recipes by name: ours and those of installed packages, registered under `drivetrain.fp8_recipes`."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any, cast

import torch

from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.protocol import Fp8Recipe
from drivetrain_precision.settings import PrecisionSettings

ENTRY_POINT_GROUP = "drivetrain.fp8_recipes"
# Accuracy before speed: scales of small blocks, then of rows, then of tensors.
_BEST_FIRST = (
    "te_mxfp8",
    "torchao_mxfp8",
    "te_block",
    "torchao_rowwise",
    "te_current",
    "torchao_tensorwise",
    "te_delayed",
)
# Emulation costs the less the simpler the scales are, and is there to try a program out.
_EMULATED_FIRST = ("torchao_tensorwise", "torchao_rowwise")


def recipe_names() -> tuple[str, ...]:
    """Return the names of all recipes, sorted; nothing is imported."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def check_recipe_name(name: str) -> None:
    """Refuse a name that settings give to no recipe; "auto" stands for any.

    Raises:
        PrecisionError: There is no recipe of this name; the message lists all.
    """
    if name != "auto" and name not in recipe_names():
        raise PrecisionError(
            f"fp8_recipe={name!r}: there is no such recipe; there are {', '.join(recipe_names())}"
        )


def load_recipe(name: str) -> Fp8Recipe:
    """Return a recipe with its default options.

    Raises:
        PrecisionError: There is no recipe of this name; the message lists all.
    """
    check_recipe_name(name)
    (point,) = entry_points(group=ENTRY_POINT_GROUP, name=name)
    return point.load()()


def choose_recipe(
    device: torch.device, settings: PrecisionSettings, given: Fp8Recipe | None = None
) -> tuple[Fp8Recipe | None, str]:
    """Return the recipe of a run; None, and why, if the device or the libraries cannot run it.

    Args:
        device: The device that training runs on.
        settings: The settings that name it, and the layers that it leaves out.
        given: A recipe given in code, which comes before the settings.

    Raises:
        PrecisionError: The settings name no recipe, or another one than the one given, or layers that it leaves out.
    """
    if given is not None:
        _check_agrees(given, settings)
    if given is None and settings.fp8_recipe == "auto":
        able = _able(device)
        if not able:
            shown = "; ".join(
                f"{name}: {load_recipe(name).support(device).reason}" for name in recipe_names()
            )
            return None, f"no recipe runs here ({shown}); train in bf16, or ask for fp8_fallback='bf16'"
        return _with_settings(able[0], settings), ""
    recipe = given or _with_settings(load_recipe(settings.fp8_recipe), settings)
    support = recipe.support(device)
    if support.level != "none":
        return recipe, ""
    able = sorted(_able(device), key=lambda each: each.requirements.library != recipe.requirements.library)
    nearest = (
        f"the nearest that runs here is {able[0].name!r}; " if able else "no other recipe runs here either; "
    )
    return (
        None,
        f"recipe {recipe.name!r}: {support.reason}; {nearest}fp8_fallback='bf16' trains in bf16 instead",
    )


def _able(device: torch.device) -> list[Fp8Recipe]:
    """Return the recipes that a device can run, the best first; those in hardware before those that are emulated."""
    levels = {name: load_recipe(name).support(device).level for name in recipe_names()}
    native = _in_order([name for name, level in levels.items() if level == "native"], _BEST_FIRST)
    emulated = _in_order([name for name, level in levels.items() if level == "emulated"], _EMULATED_FIRST)
    return [load_recipe(name) for name in (*native, *emulated)]


def _in_order(names: Sequence[str], first: Sequence[str]) -> list[str]:
    """Return names with those of `first` before the others, in its order."""
    return [*(name for name in first if name in names), *(name for name in names if name not in first)]


def _check_agrees(given: Fp8Recipe, settings: PrecisionSettings) -> None:
    """Check that the settings say nothing that a recipe given in code would leave unheard."""
    if settings.fp8_recipe not in ("auto", given.name):
        raise PrecisionError(
            f"precision.fp8_recipe={settings.fp8_recipe!r}, and fp8_recipe={given.name!r} is given in code; say one"
        )
    if settings.fp8_exclude or not settings.fp8_skip_ends:
        said = f"precision.fp8_exclude={settings.fp8_exclude!r}, fp8_skip_ends={settings.fp8_skip_ends!r}"
        raise PrecisionError(
            f"{said}: the recipe given in code has a filter of its own; say the same by "
            "layers=LayerFilter(exclude=..., skip_first=..., skip_last=...) of the recipe"
        )


def _with_settings(recipe: Fp8Recipe, settings: PrecisionSettings) -> Fp8Recipe:
    """Return a recipe with the layers that the settings leave out."""
    layers = replace(
        recipe.layers,
        exclude=(*recipe.layers.exclude, *settings.fp8_exclude),
        skip_first=settings.fp8_skip_ends,
        skip_last=settings.fp8_skip_ends,
    )
    options: dict[str, Any] = {"layers": layers}
    return replace(cast("Any", recipe), **options)
