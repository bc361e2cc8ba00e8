"""The linear layers of torchao that train in float8, MXFP8 and NVFP4. Importing this module imports torchao.

torchao's public functions convert whole models and make new modules. Only this module names the classes of the new
modules, so that a layer can get such a class in place. docs/design/platforms.md lists the classes, and
tests/precision/fp8 checks the behaviour that is relied on.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear
from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4Linear
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from drivetrain_precision.compat import exchange_weight_scale, mxfp8_product, rounding_seed
from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.frozen_products import FrozenFloat8Product, FrozenMXFP8Product

if TYPE_CHECKING:
    Base = nn.Linear
else:
    Base = object


class RowBlocks(Base):
    """A mixin of linear layers that compute on a multiple of `row_multiple` rows."""

    row_multiple: int

    def forward(self, input: Tensor) -> Tensor:
        """Return the output, of shape (..., out_features) for an input of shape (..., in_features)."""
        # Compiled code is in parts already, and asking for the mode would break its graph.
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # Operations of several parts reach a tensor's class whole there, and torchao's classes know the parts.
            with torch.inference_mode(False), torch.no_grad():
                return self._output(input)
        return self._output(input)

    def _output(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        num_rows = input.numel() // self.in_features
        # The gradient of the weight is a product over the rows, one for each token: a last, smaller batch would have
        # a number that the hardware refuses. Rows of zeros change no scale and no sum.
        missing = -num_rows % self.row_multiple if num_rows else self.row_multiple
        if not missing:
            return self.product(input)
        rows = F.pad(input.reshape(num_rows, self.in_features), (0, 0, 0, missing))
        return self.product(rows)[:num_rows].reshape(*input.shape[:-1], self.out_features)

    def product(self, rows: Tensor) -> Tensor:
        """Return the output for an input of shape (..., in_features) with a multiple of `row_multiple` rows."""
        return super().forward(rows)


class BlockedFloat8Linear(RowBlocks, Float8Linear):
    """torchao's float8 layer on a multiple of 16 rows."""

    row_multiple = 16

    def product(self, rows: Tensor) -> Tensor:
        """Return the output; the gradient of a frozen weight is not computed."""
        if self.weight.requires_grad:
            return super().product(rows)
        output = FrozenFloat8Product.apply(rows, self.weight.t(), self.linear_mm_config, self.config)
        bias = cast("Tensor | None", self.bias)
        return output if bias is None else output + bias.to(output.dtype)


class GatheredFloat8Linear(BlockedFloat8Linear):
    """torchao's float8 layer whose weight FSDP2 gathers in float8."""

    def weight_for_all_gather(self) -> Tensor:
        """Return the weight in the form that `fully_shard` gathers in float8: the same values and dtype."""
        config = self.config.cast_config_weight
        return WeightWithDynamicFloat8CastTensor(
            self.weight.detach(), self.linear_mm_config, config.target_dtype
        )

    def compute_scales(self, layers: nn.Module) -> None:
        """Compute the scales of all such layers in a module; see `SupportsFp8Gather`."""
        with torch.inference_mode(False):  # a training step may use them
            precompute_float8_dynamic_scale_for_fsdp(layers)

    def exchange_scale(self, shard: nn.Parameter, scale: Tensor | None) -> Tensor | None:
        """Set the scale of a weight's gathers, and return the old scale; see `SupportsFp8Gather`."""
        return exchange_weight_scale(shard, scale)


class BlockedMXFP8Linear(RowBlocks, MXFP8Linear):
    """torchao's MXFP8 layer on a multiple of 32 rows, the length of a block that shares a scale."""

    row_multiple = 32

    def product(self, rows: Tensor) -> Tensor:
        """Return the output; the gradient of a frozen weight is not computed."""
        values = rows.float() if rows.dtype == torch.float16 else rows  # torchao converts no fp16
        # As under autocast, weights are cast to the dtype of the rows.
        weight, scales = self.weight.to(values.dtype), self.scale_calculation_mode
        kernels = self.kernel_preference if rows.device.type == "cuda" else KernelPreference.EMULATED
        if self.weight.requires_grad:
            output = mxfp8_product(
                *(values, weight), kernels=kernels, scales=scales, plain_weight_gradient=self.wgrad_with_hp
            )
        else:
            output = FrozenMXFP8Product.apply(values, weight, kernels, scales)
        output = output.to(rows.dtype)
        bias = cast("Tensor | None", self.bias)
        return output if bias is None else output + bias.to(output.dtype)


class BlockedNVFP4Linear(RowBlocks, NVFP4Linear):  # pyright: ignore[reportIncompatibleMethodOverride]
    """torchao's NVFP4 layer on a multiple of 128 rows, as its kernels require."""

    row_multiple = 128

    def product(self, rows: Tensor) -> Tensor:
        """Return the output. The kernels need bf16 and a CUDA device."""
        if rows.device.type != "cuda":
            raise PrecisionError(
                f"a layer converted to NVFP4 got an input on {rows.device}: torchao computes NVFP4 on CUDA devices "
                "alone; restore_model(model, recipe) gives the plain layers back, and MXFP8 and float8 are emulated"
            )
        bias = cast("Tensor | None", self.bias)
        return nvfp4_linear(
            rows.bfloat16(),
            self.weight.bfloat16(),
            None if bias is None else bias.bfloat16(),
            sign_vector=self.rht_sign_vector,
            kernel_preference=self.kernel_preference,
            sr_seed=rounding_seed(self),
        )


# The signs of the random Hadamard transform. torchao draws them for each layer; one choice for all is as good, and is
# no state that a checkpoint would have to keep.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def float8_like(*, scaling: str, round_scales: bool, all_gather: bool) -> nn.Module:
    """Return a layer whose class makes other layers compute in float8; `scaling` names torchao's recipe."""
    config: Any = Float8LinearConfig.from_recipe_name(scaling)
    if round_scales:
        config = replace(config, round_scales_to_power_of_2=True)
    with torch.device("meta"):
        # By the public function, which also works around a fault of Triton's compiler.
        made: Any = convert_to_float8_training(nn.Linear(1, 1, bias=False), config=config)
    made.__class__ = GatheredFloat8Linear if all_gather else BlockedFloat8Linear
    return made


def mxfp8_like(*, weight_gradient: bool) -> nn.Module:
    """Return a layer whose class makes other layers compute in MXFP8, optionally with the weight's gradient."""
    with torch.device("meta"):
        return BlockedMXFP8Linear(
            *(1, 1, False), kernel_preference=KernelPreference.AUTO, wgrad_with_hp=not weight_gradient
        )


def nvfp4_like(device: torch.device) -> nn.Module:
    """Return a layer whose class makes other layers on a device compute in NVFP4."""
    return BlockedNVFP4Linear(1, 1, bias=False, device=device, rht_sign_vector=_SIGNS)
