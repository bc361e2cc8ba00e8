"""Drivetrain's recipes for the options of training in fp8."""

from dataclasses import replace
from typing import Any

from drivetrain_accelerate.plugins.fp8_recipes import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from drivetrain_accelerate.plugins.option_fields import TranslationError, refusal
from drivetrain_precision import Fp8Recipe, LayerFilter, TorchaoRecipe, TransformerEngineRecipe


def check_fp8_precision(handler: Any, mixed_precision: str | None) -> None:
    """Refuse options of fp8, if a program gives any, for a run in another precision, as Accelerate does."""
    if handler is not None and mixed_precision != "fp8":
        raise ValueError(
            f"{type(handler).__name__} with mixed_precision={mixed_precision or 'no'!r}: options of fp8 have no "
            "effect there; say mixed_precision='fp8', or leave the handler out"
        )


def fp8_recipe(
    handler: AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs | FP8RecipeKwargs, *, is_sharded: bool = True
) -> Fp8Recipe:
    """Return the recipe that options of fp8 describe, with the layers that Accelerate would convert.

    Where FSDP does not divide the weights, none is gathered in fp8, whatever the options say.
    """
    if isinstance(handler, AORecipeKwargs):
        return _torchao_recipe(handler, is_sharded=is_sharded)
    is_msamp = isinstance(handler, FP8RecipeKwargs) and handler.backend == "MSAMP"
    if is_msamp or not isinstance(handler, TERecipeKwargs):
        raise TranslationError(
            f"{type(handler).__name__}: MS-AMP (drivetrain: fp8 recipes) is not trained with, nor maintained; "
            "give AORecipeKwargs() or TERecipeKwargs()"
        )
    every = LayerFilter(skip_first=False, skip_last=False)
    options: dict[str, object] = {"margin": handler.margin, "fp8_format": str(handler.fp8_format).lower()}
    if handler.use_mxfp8_block_scaling:
        return TransformerEngineRecipe(scaling="mxfp8", options=options, layers=every)
    options["amax_history_len"] = handler.amax_history_len
    options["amax_compute_algo"] = handler.amax_compute_algo
    if any(handler.override_linear_precision or ()):
        options["override_linear_precision"] = handler.override_linear_precision
    return TransformerEngineRecipe(scaling="delayed", options=options, layers=every)


def _torchao_recipe(handler: AORecipeKwargs, *, is_sharded: bool) -> TorchaoRecipe:
    from torchao.float8 import Float8LinearConfig

    layers = LayerFilter()  # all but the first and the last, as by Accelerate's own filter
    if (accepts := handler.module_filter_func) is not None:
        layers = LayerFilter(
            skip_first=False, skip_last=False, accept=lambda name, module: bool(accepts(module, name))
        )
    config: Any = handler.config
    plain = replace(
        config,
        enable_fsdp_float8_all_gather=False,
        pad_inner_dim=False,
        round_scales_to_power_of_2=False,
        emulate=False,
        force_recompute_fp8_weight_in_bwd=False,
    )
    for scaling in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        known: Any = Float8LinearConfig.from_recipe_name(scaling)
        if plain == replace(known, round_scales_to_power_of_2=False):
            return TorchaoRecipe(
                scaling=scaling,
                round_scales=config.round_scales_to_power_of_2 and scaling == "tensorwise",
                all_gather=is_sharded and config.enable_fsdp_float8_all_gather,
                layers=layers,
            )
    instead = (
        "the recipes are Float8LinearConfig.from_recipe_name's: tensorwise, rowwise and rowwise_with_gw_hp"
    )
    raise refusal(handler, "config", config, instead, ours="TorchaoRecipe(scaling=)")
