"""Convert linear layers of a model to torchao's float8."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain_accelerate.plugins.fp8_recipes import AORecipeKwargs
from drivetrain_accelerate.plugins.translate_fp8 import fp8_recipe
from drivetrain_precision import convert_model

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layer; None if it has none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Return whether a layer can be converted: its sizes are multiples of 16, and it is none of those left out.

    Args:
        module: The layer; modules of other classes can.
        fqn: The name of the layer.
        layers_to_filter: The names that are left out.
    """
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
    """Let linear layers compute in float8, in place.

    Args:
        model: The model to convert.
        config: torchao's configuration, one of its recipes; None: one scale for a tensor.
        module_filter_func: A function of layer and name that returns whether to convert it; None: all but the first
            and the last whose sizes are multiples of 16.

    Raises:
        TranslationError: The configuration is none of the recipes.
        NothingConvertedError: No layer can be converted.
    """
    from torchao.float8 import Float8LinearConfig

    handler = AORecipeKwargs(config=config or Float8LinearConfig(), module_filter_func=module_filter_func)
    convert_model(model, fp8_recipe(handler))
