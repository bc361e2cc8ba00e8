"""Convert linear layers of a model to float8, by torchao or Transformer Engine."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from drivetrain_accelerate.plugins.fp8_recipes import AORecipeKwargs, TERecipeKwargs
from drivetrain_accelerate.plugins.translate_fp8 import fp8_recipe
from drivetrain_precision import LayerFilter, TransformerEngineRecipe, restore_model
from drivetrain_precision import convert_model as convert_by

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layer; None if it has none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Return whether a layer can be converted: its sizes are multiples of 16, and its name is not left out."""
    if isinstance(module, nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether a layer can be converted, and is not the first or last one inside of a module of this name."""
    ends = find_first_last_linear_layers(module)
    return filter_linear_layers(module, fqn, [name for name in ends if name is not None])


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether any layer computes in torchao's float8."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


def convert_model_to_fp8_ao(
    model: nn.Module,
    config: "Float8LinearConfig | None" = None,
    module_filter_func: Callable[..., Any] | None = None,
) -> None:
    """Let linear layers compute in float8, in place, by one of torchao's recipes; None: one scale for a tensor.

    Without a function of layer and name that chooses, all are converted but the first, the last, and those with a
    size that is no multiple of 16.

    Raises:
        TranslationError: The configuration is none of the recipes.
        NothingConvertedError: No layer can be converted.
    """
    from torchao.float8 import Float8LinearConfig

    handler = AORecipeKwargs(config=config or Float8LinearConfig(), module_filter_func=module_filter_func)
    convert_by(model, fp8_recipe(handler))


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Replace a model's linear layers by Transformer Engine's, or back, in place; norms stay torch's.

    Raises:
        PrecisionError: Transformer Engine is not installed, or cannot run here.
        NothingConvertedError: No layer can be converted.
    """
    del _convert_ln
    recipe = TransformerEngineRecipe(scaling="delayed", layers=LayerFilter(skip_first=False, skip_last=False))
    if not to_transformer_engine:
        restore_model(model, recipe)
    elif _convert_linear:
        convert_by(model, recipe)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether any layer is Transformer Engine's."""
    recipe = TransformerEngineRecipe()
    return any(recipe.is_converted(module) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a bound forward that computes by Transformer Engine's recipe in training, or in evaluation too."""
    from transformer_engine.pytorch import autocast  # pyright: ignore[reportMissingImports]

    @wraps(model_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with cast("Any", autocast)(enabled=use_during_eval or self.training, recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Let a converted model compute in fp8 by a handler's recipe, or by the default one."""
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
