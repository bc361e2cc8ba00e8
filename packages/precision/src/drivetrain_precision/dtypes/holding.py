"""Cast a model's parameters and buffers to the dtypes of a policy, in place."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from drivetrain_precision.dtypes.dtype_policy import NAMES, DtypePolicy


def held_dtype(tensor: Tensor, dtypes: DtypePolicy, *, is_island: bool) -> torch.dtype:
    """Return the dtype for a parameter or buffer; integers and quantized weights keep their dtype."""
    is_plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    if not is_plain or tensor.dtype not in (*NAMES, torch.float64):
        return tensor.dtype
    if is_island:  # float64 keeps more than fp32
        return torch.promote_types(tensor.dtype, torch.float32)
    said = dtypes.param if isinstance(tensor, nn.Parameter) else dtypes.buffer
    return tensor.dtype if said is None else said


@torch.no_grad()
def hold(model: nn.Module, dtypes: DtypePolicy, islands: Collection[nn.Module]) -> None:
    """Cast a model's parameters and buffers in place; for optimizers, parameters stay the same objects."""
    if dtypes.param is None and dtypes.buffer is None and not islands:
        return
    cast: dict[Tensor, Tensor] = {}  # a buffer that two modules share stays shared
    for module in model.modules():
        is_island = module in islands
        for parameter in module.parameters(recurse=False):
            dtype = held_dtype(parameter, dtypes, is_island=is_island)
            if dtype is not parameter.dtype:
                gradient, parameter.grad = parameter.grad, None
                parameter.data = parameter.data.to(dtype)
                if gradient is not None:
                    parameter.grad = gradient.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            dtype = held_dtype(buffer, dtypes, is_island=is_island)
            if dtype is not buffer.dtype:
                setattr(module, name, cast.setdefault(buffer, buffer.to(dtype)))
