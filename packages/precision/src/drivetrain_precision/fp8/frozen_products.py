"""Products with frozen weights, without the weight's gradient, which torchao 0.18 computes even for frozen weights.

The input, which only the weight's gradient needs, is not kept for the backward. Output and input gradient equal those
of torchao's own functions, bit for bit. Importing this module imports torchao.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import allow_in_graph
from torchao.float8.config import ScalingType
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole

from drivetrain_precision.compat import mxfp8_product


@allow_in_graph
class FrozenFloat8Product(torch.autograd.Function):
    """The product of rows and a frozen weight in float8."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transposed: Tensor, products: Any, config: Any) -> Tensor:
        """Return the product (..., out_features) of rows and a transposed weight, which may be gathered in float8."""
        output = matmul_with_hp_or_float8_args.forward(ctx, rows, transposed, products, config)
        ctx.save_for_backward(transposed)  # in place of the input too
        return output

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the rows."""
        (transposed,), config = ctx.saved_tensors, ctx.config
        flat = grad_output.reshape(-1, grad_output.shape[-1])
        gradient = _cast(flat, config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, ctx)
        weight = _cast(transposed, config.cast_config_weight_for_grad_input, GemmInputRole.WEIGHT, ctx)
        result = torch.mm(gradient, weight.t())
        return result.reshape(*grad_output.shape[:-1], result.shape[-1]), None, None, None


@allow_in_graph
class FrozenMXFP8Product(torch.autograd.Function):
    """The product of rows and a frozen weight in MXFP8."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, kernels: Any, scales: Any) -> Tensor:
        """Return the product of rows and a weight, of shape (..., out_features), in the rows' dtype."""
        ctx.save_for_backward(weight)
        ctx.kernels, ctx.scales = kernels, scales
        return mxfp8_product(rows, weight, kernels=kernels, scales=scales, plain_weight_gradient=True)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Return the rows' gradient: the product of the output's gradient and the weight, summed over outputs."""
        (weight,) = ctx.saved_tensors
        gradient = mxfp8_product(
            grad_output.contiguous(),
            weight.t().contiguous(),
            kernels=ctx.kernels,
            scales=ctx.scales,
            plain_weight_gradient=True,
        )
        return gradient, None, None, None


def _cast(tensor: Tensor, cast: Any, role: GemmInputRole, ctx: Any) -> Tensor:
    """Cast a factor of the input's gradient as torchao does, for a sum over its last dimension."""
    if tensor_already_casted_to_fp8(tensor) or cast.scaling_type is ScalingType.DISABLED:
        return tensor
    return hp_tensor_to_float8_dynamic(
        tensor,
        cast.target_dtype,
        ctx.linear_mm_config,
        gemm_input_role=role,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(-1, cast.scaling_granularity),
        round_scales_to_power_of_2=ctx.config.round_scales_to_power_of_2,
    )
