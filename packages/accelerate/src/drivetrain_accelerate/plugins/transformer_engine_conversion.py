"""Convert linear layers of a model to Transformer Engine's, and let its forward compute in fp8."""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from torch import nn

from drivetrain_accelerate.plugins.fp8_recipes import TERecipeKwargs
from drivetrain_accelerate.plugins.translate_fp8 import fp8_recipe
from drivetrain_precision import LayerFilter, TransformerEngineRecipe
from drivetrain_precision import convert_model as convert
from drivetrain_precision import restore_model as restore


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Replace linear layers by Transformer Engine's, or back; norms stay torch's.

    Args:
        model: The model, changed in place.
        to_transformer_engine: Whether to convert, not to restore.
        _convert_linear: Whether to convert linear layers.
        _convert_ln: Without effect: a norm computes the same in either library.

    Raises:
        PrecisionError: Transformer Engine is not installed, or cannot run here.
        NothingConvertedError: No layer can be converted.
    """
    del _convert_ln
    recipe = TransformerEngineRecipe(scaling="delayed", layers=LayerFilter(skip_first=False, skip_last=False))
    if not to_transformer_engine:
        restore(model, recipe)
    elif _convert_linear:
        convert(model, recipe)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether any layer is Transformer Engine's."""
    recipe = TransformerEngineRecipe()
    return any(recipe.is_converted(module) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a forward that computes in fp8 while its module trains.

    Args:
        model_forward: The bound forward of a model.
        fp8_recipe: Transformer Engine's own recipe object.
        use_during_eval: Whether evaluation computes in fp8 too.
    """
    from transformer_engine.pytorch import autocast  # pyright: ignore[reportMissingImports]

    @wraps(model_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with cast("Any", autocast)(enabled=use_during_eval or self.training, recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Let a converted model compute in fp8 by a handler's recipe.

    Args:
        model: The converted model.
        fp8_recipe_handler: The options; None: the defaults.

    Raises:
        PrecisionError: Transformer Engine is not installed.
    """
    recipe = fp8_recipe(fp8_recipe_handler or TERecipeKwargs())
    during_eval = bool(fp8_recipe_handler and fp8_recipe_handler.use_autocast_during_eval)
    forward = model.forward

    @wraps(forward)
    def computing(*args: Any, **kwargs: Any) -> Any:
        if not (model.training or during_eval):
            return forward(*args, **kwargs)
        with recipe.computing():
            return forward(*args, **kwargs)

    model.forward = computing
    return model
