"""Transformer Engine's recipe objects by name, the check that a device can run them, and the scales of layers."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.hardware_check import ADA, BLACKWELL, HOPPER, GPUGeneration
from drivetrain_precision.fp8.protocol import Products, products_of
from drivetrain_precision.fp8.te_library import transformer_engine

# The library's key for each pass, and the suffix that we give its tensors.
_PASSES = {"scaling_fwd": "forward", "scaling_bwd": "backward"}
_TENSORS = ("scale", "amax_history")


@dataclass(frozen=True, slots=True, kw_only=True)
class TERecipeKind:
    """A recipe of Transformer Engine: the name of its class, and facts that are known without the library."""

    recipe: str
    available: str  # the function that says whether the current CUDA device runs it, and why not
    on: GPUGeneration
    products: Products
    multiple: int = 16  # of both sizes of a weight; else the first forward is an error


_HYBRID = products_of("e4m3 x e4m3", "e5m2 x e4m3")
TE_RECIPES: Mapping[str, TERecipeKind] = {
    "delayed": TERecipeKind(recipe="DelayedScaling", available="is_fp8_available", on=ADA, products=_HYBRID),
    "current": TERecipeKind(
        recipe="Float8CurrentScaling", available="is_fp8_available", on=ADA, products=_HYBRID
    ),
    "block": TERecipeKind(
        recipe="Float8BlockScaling",
        available="is_fp8_block_scaling_available",
        on=GPUGeneration("a Hopper GPU", HOPPER.capability),
        products=products_of("e4m3 x e4m3"),
    ),
    "mxfp8": TERecipeKind(
        recipe="MXFP8BlockScaling",
        available="is_mxfp8_available",
        on=BLACKWELL,
        products=products_of("mxfp8 x mxfp8"),
        multiple=32,
    ),
    "nvfp4": TERecipeKind(
        recipe="NVFP4BlockScaling",
        available="is_nvfp4_available",
        on=BLACKWELL,
        products=products_of("nvfp4 x nvfp4"),
    ),
}


def te_recipe(name: str, **options: object) -> Any:
    """Return a recipe object of Transformer Engine: "delayed", "current", "block", "mxfp8" or "nvfp4".

    Options are fields of the object's class; formats are given by name. Other fields have Transformer Engine's
    defaults, which variables (NVTE_...) may change at import. PrecisionError if an option is unknown or refused.
    """
    kind = te_recipe_kind(name)
    library = transformer_engine("common.recipe")
    made = getattr(library, kind.recipe)
    known = [field.name for field in fields(made)]
    if unknown := sorted(options.keys() - set(known)):
        raise PrecisionError(f"recipe {name!r} has no option {unknown[0]!r}: there are {', '.join(known)}")
    given = dict(options)
    formats = library.Format.__members__
    for option, value in options.items():
        if option.endswith("_format") and isinstance(value, str):
            if value.upper() not in formats:
                allowed = ", ".join(name.lower() for name in formats)
                raise PrecisionError(f"{option}={value!r}: must be one of {allowed}")
            given[option] = formats[value.upper()]
    try:
        recipe = made(**given)
    except ValueError as error:  # pydantic's, which also carries the library's own assertions
        details: list[Any] = cast("Any", error).errors()
        reason = "; ".join(f"{' '.join(map(str, each['loc']))} {each['msg']}".strip() for each in details)
        raise PrecisionError(f"recipe {name!r} with {options}: {reason}") from error
    _apply_power_of_2_scales(recipe, options)
    return recipe


def te_unsupported(name: str) -> str | None:
    """Return why the current CUDA device or the installed library cannot run a recipe, or None if they can."""
    kind = te_recipe_kind(name)
    try:  # Transformer Engine's own `autocast` does not check "nvfp4"
        library = transformer_engine()
    except ImportError as error:  # it is installed, and does not fit the torch or the CUDA that is
        return str(error)
    if not torch.cuda.is_available():
        return "Transformer Engine computes on CUDA devices only, and there is none"
    available, reason = getattr(library, kind.available)(return_reason=True)
    return None if available else str(reason)


def te_recipe_kind(name: str) -> TERecipeKind:
    """Return the facts about a recipe known without the library; PrecisionError for an unknown name."""
    if name not in TE_RECIPES:
        allowed = ", ".join(map(repr, TE_RECIPES))
        raise PrecisionError(f"{name!r} is no recipe of Transformer Engine: must be one of {allowed}")
    return TE_RECIPES[name]


def _apply_power_of_2_scales(recipe: Any, options: Mapping[str, object]) -> None:
    """Apply the options for powers of 2: Transformer Engine 2.20 reads variables and ignores these arguments."""
    if "use_power_2_scales" in options:
        powers = bool(options["use_power_2_scales"])
    elif "use_f32_scales" in options:
        powers = not options["use_f32_scales"]
    else:
        return
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, replace(getattr(recipe, name), power_2_scale=powers))


def te_scaling_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a layer's own tensors of delayed scaling; loading a checkpoint copies values into them.

    In fp32: `scale_forward` of shape (3,), for input, weight and output; `amax_history_forward` of shape
    (amax_history_len, 3); and both for the backward with 2 in place of 3, for the gradients of output and input.
    Empty for other recipes and before the first forward (`begin_te_scaling` makes the tensors earlier).
    """
    kept: Any = getattr(module, "fp8_meta", {})
    return {
        f"{name}_{phase}": getattr(kept[key], name)
        for key, phase in _PASSES.items()
        for name in _TENSORS
        if hasattr(kept.get(key), name)
    }


def begin_te_scaling(module: nn.Module, recipe: object) -> None:
    """Make the tensors of delayed scaling on a CUDA device, for the first forward to take over."""
    layer: Any = module
    layer.fp8_meta.update(recipe=recipe, num_gemms=1)
    layer.init_fp8_meta_tensors(recipe)
