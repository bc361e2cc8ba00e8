"""The options of training in fp8 for each library, and their translation into drivetrain's recipes."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import nn

from drivetrain_accelerate.environment_variables import fill_unsaid, value_from
from drivetrain_accelerate.plugins.kwargs_handlers import KwargsHandler
from drivetrain_accelerate.plugins.option_fields import (
    TranslationError,
    becomes,
    options,
    refusal,
    without_effect,
)
from drivetrain_precision import Fp8Recipe, LayerFilter, TorchaoRecipe, TransformerEngineRecipe, restore_model
from drivetrain_precision import convert_model as convert_by

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_ENV = "ACCELERATE_FP8_"
_TE_OPTION = "TransformerEngineRecipe(options=)"


@options
class AORecipeKwargs(KwargsHandler):
    """Options of fp8 by torchao."""

    config: "Float8LinearConfig | None" = becomes(
        "TorchaoRecipe(scaling=, round_scales=, all_gather=)", default=None
    )
    module_filter_func: Callable[..., Any] | None = becomes("LayerFilter(accept=)", default=None)
    pad_inner_dim: bool | None = without_effect(
        "layers whose sizes are no multiple of 16 stay in bf16, as by Accelerate's own filter", default=None
    )
    enable_fsdp_float8_all_gather: bool | None = becomes("TorchaoRecipe(all_gather=)", default=None)

    def __post_init__(self) -> None:
        """Make the configuration; raise an ImportError without torchao."""
        try:
            from torchao.float8 import Float8LinearConfig
        except ImportError as error:
            raise ImportError(
                "AORecipeKwargs needs torchao: install drivetrain-precision[torchao], or train in bf16"
            ) from error
        if self.config is not None:
            return
        fill_unsaid(self, _ENV, pad_inner_dim=True, enable_fsdp_float8_all_gather=True)
        chosen: Any = self  # its two truth values are filled
        self.config = Float8LinearConfig(
            pad_inner_dim=chosen.pad_inner_dim,
            enable_fsdp_float8_all_gather=chosen.enable_fsdp_float8_all_gather,
        )


@options
class TERecipeKwargs(KwargsHandler):
    """Options of fp8 by Transformer Engine. Options that are not given come from the environment."""

    use_autocast_during_eval: bool | None = without_effect(
        "evaluation computes in the same formats as training", default=None
    )
    margin: int | None = becomes(_TE_OPTION, default=None)
    interval: int | None = without_effect(
        "Transformer Engine computes scales in every step, and ignores it", default=None
    )
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = becomes(_TE_OPTION, default=None)
    amax_history_len: int | None = becomes(_TE_OPTION, default=None)
    amax_compute_algo: Literal["max", "most_recent"] | None = becomes(_TE_OPTION, default=None)
    override_linear_precision: tuple[bool, bool, bool] | None = becomes(_TE_OPTION, default=None)
    use_mxfp8_block_scaling: bool | None = becomes("TransformerEngineRecipe(scaling='mxfp8')", default=None)

    def __post_init__(self) -> None:
        """Fill the fields; raise a ValueError for an unknown word."""
        fill_unsaid(self, _ENV, margin=0, interval=1, amax_history_len=1024, amax_compute_algo="most_recent")
        fill_unsaid(self, _ENV, use_autocast_during_eval=False, use_mxfp8_block_scaling=False)
        fill_unsaid(self, "ACCELERATE_", fp8_format="HYBRID")
        in_capitals: Any = str(self.fp8_format).upper()
        self.fp8_format = in_capitals
        _check_one_of(self, "fp8_format", "HYBRID", "E4M3", "E5M2")
        _check_one_of(self, "amax_compute_algo", "max", "most_recent")
        if self.override_linear_precision is None:
            forward, data, weight = (
                value_from(f"{_ENV}OVERRIDE_{name}", False) for name in ("FPROP", "DGRAD", "WGRAD")
            )
            self.override_linear_precision = (forward, data, weight)


@options
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of fp8 by MS-AMP; drivetrain does not train with MS-AMP."""

    opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        """Fill the level; raise a ValueError for an unknown one."""
        fill_unsaid(self, _ENV, opt_level="O2")
        _check_one_of(self, "opt_level", "O1", "O2")


@options
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The older options of fp8, in one class for all libraries."""

    backend: Literal["MSAMP", "TE"] | None = None

    def __post_init__(self) -> None:
        """Fill the fields of the chosen library; raise a ValueError for an unknown word."""
        # Accelerate takes MS-AMP if neither is said, and then fails where it is not installed.
        fill_unsaid(self, _ENV, backend="TE")
        in_capitals: Any = str(self.backend).upper()
        self.backend = in_capitals
        _check_one_of(self, "backend", "MSAMP", "TE")
        TERecipeKwargs.__post_init__(self)
        if self.backend == "MSAMP":
            MSAMPRecipeKwargs.__post_init__(self)


def _check_one_of(options: object, field: str, *allowed: str) -> None:
    if (value := getattr(options, field)) not in allowed:
        raise ValueError(f"{field}={value!r}: `{field}` must be one of {' or '.join(allowed)}")


def check_fp8_precision(handler: Any, mixed_precision: str | None) -> None:
    """Raise a ValueError if a program gives options of fp8 in another precision, as Accelerate does."""
    if handler is not None and mixed_precision != "fp8":
        raise ValueError(
            f"{type(handler).__name__} with mixed_precision={mixed_precision or 'no'!r}: options of fp8 have no "
            "effect there; say mixed_precision='fp8', or leave the handler out"
        )


def fp8_recipe(
    handler: AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs | FP8RecipeKwargs, *, is_sharded: bool = True
) -> Fp8Recipe:
    """Return the recipe for options of fp8; it converts the same layers as Accelerate.

    If FSDP does not divide the weights (`is_sharded=False`), the option to gather weights in fp8 is ignored.
    """
    if isinstance(handler, AORecipeKwargs):
        return _torchao_recipe(handler, is_sharded=is_sharded)
    is_msamp = isinstance(handler, FP8RecipeKwargs) and handler.backend == "MSAMP"
    if is_msamp or not isinstance(handler, TERecipeKwargs):
        raise TranslationError(
            f"{type(handler).__name__}: MS-AMP (drivetrain: fp8 recipes) is not supported, nor maintained; "
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


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layer; two None if it has no linear layer."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Return whether a layer can be converted: its sizes are multiples of 16, and its name is not left out."""
    if isinstance(module, nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether a layer can be converted and is not the first or last linear layer inside `module`."""
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
    """Convert linear layers to float8, in place, by a torchao recipe; by default with one scale per tensor.

    Without `module_filter_func` (layer, name), all layers are converted except the first, the last, and layers with a
    size that 16 does not divide. A TranslationError refuses other recipes. A NothingConvertedError says that no layer
    can be converted.
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
    """Replace linear layers by Transformer Engine's, or undo it, in place; norms stay torch's.

    A PrecisionError asks for the library or a fitting device. A NothingConvertedError says that no layer fits.
    """
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
    """Return a method that runs a bound forward under Transformer Engine's recipe, by default in training only."""
    from transformer_engine.pytorch import autocast  # pyright: ignore[reportMissingImports]

    @wraps(model_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with cast("Any", autocast)(enabled=use_during_eval or self.training, recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Make a converted model compute in fp8, by a handler's recipe or the default recipe."""
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
