"""Mixed precision that fits the hardware.

`choose_policy` takes a device and a mode ("bf16", "fp16", "auto" or "no"), and returns the dtype to compute in with
the reason; if the device does not support the mode, the error lists what it supports. `autocast` applies the
policy, and `LossScaler` keeps fp16 gradients from underflowing. `SkippedSteps` ends a run that never steps and
names the layer that overflows first; `watch_gradients` counts underflow by layer. `convert_model` lets linear
layers compute in 8 bits or fewer by a recipe, and reports on each layer. A `DtypePolicy` holds the dtypes of
parameters, reduced gradients and outputs; `Bf16Updates` steps weights held in bf16.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_precision.casting import NoAutocast as NoAutocast
    from drivetrain_precision.casting import autocast as autocast
    from drivetrain_precision.checks.autocast_record import RecordedAutocast as RecordedAutocast
    from drivetrain_precision.checks.autocast_rules import autocast_rules as autocast_rules
    from drivetrain_precision.checks.autocast_rules import fp32_operations as fp32_operations
    from drivetrain_precision.checks.half_precision import HalfOperations as HalfOperations
    from drivetrain_precision.checks.half_precision import find_half_operations as find_half_operations
    from drivetrain_precision.conversion.layer_filter import LayerFilter as LayerFilter
    from drivetrain_precision.dtypes.dtype_policy import DtypePolicy as DtypePolicy
    from drivetrain_precision.dtypes.fp32_islands import find_islands as find_islands
    from drivetrain_precision.dtypes.fp32_islands import keep_in_fp32 as keep_in_fp32
    from drivetrain_precision.errors import HalfPrecisionWarning as HalfPrecisionWarning
    from drivetrain_precision.errors import NothingConvertedError as NothingConvertedError
    from drivetrain_precision.errors import PrecisionError as PrecisionError
    from drivetrain_precision.errors import SkippedStepsError as SkippedStepsError
    from drivetrain_precision.fp8.layer_conversion import ConversionReport as ConversionReport
    from drivetrain_precision.fp8.layer_conversion import convert_model as convert_model
    from drivetrain_precision.fp8.layer_conversion import load_recipe_state as load_recipe_state
    from drivetrain_precision.fp8.layer_conversion import recipe_state as recipe_state
    from drivetrain_precision.fp8.layer_conversion import restore_model as restore_model
    from drivetrain_precision.fp8.protocol import Fp8Recipe as Fp8Recipe
    from drivetrain_precision.fp8.protocol import Products as Products
    from drivetrain_precision.fp8.protocol import Requirements as Requirements
    from drivetrain_precision.fp8.protocol import SupportsFp8Gather as SupportsFp8Gather
    from drivetrain_precision.fp8.registry import load_recipe as load_recipe
    from drivetrain_precision.fp8.registry import recipe_names as recipe_names
    from drivetrain_precision.fp8.torchao_recipes import TorchaoRecipe as TorchaoRecipe
    from drivetrain_precision.fp8.transformer_engine_recipe import (
        TransformerEngineRecipe as TransformerEngineRecipe,
    )
    from drivetrain_precision.losses.chunked_head import chunked_cross_entropy as chunked_cross_entropy
    from drivetrain_precision.losses.existing_logits import cross_entropy as cross_entropy
    from drivetrain_precision.optim.bf16_updates import Bf16Updates as Bf16Updates
    from drivetrain_precision.optim.optimizer_states import is_low_bit as is_low_bit
    from drivetrain_precision.optim.optimizer_states import optimizer_states as optimizer_states
    from drivetrain_precision.policy import Policy as Policy
    from drivetrain_precision.policy import choose_policy as choose_policy
    from drivetrain_precision.quantized.export import export_quantized as export_quantized
    from drivetrain_precision.quantized.export import load_quantized as load_quantized
    from drivetrain_precision.quantized.fake_quantize import QuantizedScheme as QuantizedScheme
    from drivetrain_precision.quantized.fake_quantize import prepare_qat as prepare_qat
    from drivetrain_precision.quantized.fake_quantize import undo_qat as undo_qat
    from drivetrain_precision.scaling.gradient_watch import watch_gradients as watch_gradients
    from drivetrain_precision.scaling.scaler import LossScaler as LossScaler
    from drivetrain_precision.scaling.skipped_steps import SkippedSteps as SkippedSteps
    from drivetrain_precision.settings import PrecisionSettings as PrecisionSettings
    from drivetrain_precision.support import Support as Support
    from drivetrain_precision.support import supported_modes as supported_modes
    from drivetrain_precision.testing import RecipeContract as RecipeContract

# Module -> its public names.
_NAMES = {
    "casting": "autocast NoAutocast",
    "checks.autocast_record": "RecordedAutocast",
    "checks.autocast_rules": "autocast_rules fp32_operations",
    "checks.half_precision": "find_half_operations HalfOperations",
    "conversion.layer_filter": "LayerFilter",
    "dtypes.dtype_policy": "DtypePolicy",
    "dtypes.fp32_islands": "find_islands keep_in_fp32",
    "errors": "HalfPrecisionWarning NothingConvertedError PrecisionError SkippedStepsError",
    "fp8.layer_conversion": "ConversionReport convert_model load_recipe_state recipe_state restore_model",
    "fp8.protocol": "Fp8Recipe Products Requirements SupportsFp8Gather",
    "fp8.registry": "load_recipe recipe_names",
    "fp8.torchao_recipes": "TorchaoRecipe",
    "fp8.transformer_engine_recipe": "TransformerEngineRecipe",
    "losses.chunked_head": "chunked_cross_entropy",
    "losses.existing_logits": "cross_entropy",
    "optim.bf16_updates": "Bf16Updates",
    "optim.optimizer_states": "is_low_bit optimizer_states",
    "policy": "choose_policy Policy",
    "quantized.export": "export_quantized load_quantized",
    "quantized.fake_quantize": "prepare_qat QuantizedScheme undo_qat",
    "scaling.gradient_watch": "watch_gradients",
    "scaling.scaler": "LossScaler",
    "scaling.skipped_steps": "SkippedSteps",
    "settings": "PrecisionSettings",
    "support": "Support supported_modes",
    "testing": "RecipeContract",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
