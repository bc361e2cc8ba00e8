"""Layers of Megatron for the contract: built like nn.Linear, and divided where there is a parallel state."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_megatron.library import ModelParallelConfig, parallel_state
from drivetrain_parallel import Cut, part_of

# By the library first, which keeps Megatron's warnings on import to itself.
_megatron: Any = import_module("megatron.core.tensor_parallel")


def column_layer(num_inputs: int, num_outputs: int, *, dtype: torch.dtype) -> nn.Module:
    """A layer whose outputs ranks divide and join; without a parallel state, the whole layer."""
    whole = nn.Linear(num_inputs, num_outputs, dtype=dtype)
    if not parallel_state.is_initialized() or num_outputs == 1:
        return whole
    layer = _Column(
        num_inputs, num_outputs, config=_config(dtype), init_method=nn.init.zeros_, gather_output=True
    )
    _give(layer.weight, whole.weight, dim=0)
    _give(layer.bias, whole.bias, dim=0)
    return layer


def row_layer(num_inputs: int, num_outputs: int, *, dtype: torch.dtype) -> nn.Module:
    """A layer whose inputs ranks divide, and whose bias all hold; without a parallel state, the whole layer."""
    whole = nn.Linear(num_inputs, num_outputs, dtype=dtype)
    if not parallel_state.is_initialized():
        return whole
    layer = _Row(
        num_inputs, num_outputs, config=_config(dtype), init_method=nn.init.zeros_,
        bias=True, input_is_parallel=False, skip_bias_add=False,
    )  # fmt: skip
    _give(layer.weight, whole.weight, dim=1)
    _give(layer.bias, whole.bias, dim=None)
    return layer


class _Column(_megatron.ColumnParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class _Row(_megatron.RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def _config(dtype: torch.dtype) -> Any:
    size = parallel_state.get_tensor_model_parallel_world_size()
    return ModelParallelConfig(
        tensor_model_parallel_size=size, use_cpu_initialization=True, perform_initialization=False,
        params_dtype=dtype, gradient_accumulation_fusion=False,
    )  # fmt: skip


@torch.no_grad()
def _give(part: Tensor, whole: Tensor, *, dim: int | None) -> None:
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    if dim is None:
        part.copy_(whole)
    else:
        cut = Cut(dim=dim, pieces=(whole.shape[dim],), num_units=whole.shape[dim])
        part.copy_(part_of(whole, cut, rank, size))
