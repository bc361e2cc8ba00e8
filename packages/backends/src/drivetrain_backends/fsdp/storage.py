"""The storage of a sharded model's tensors: in which dtype, and whether each rank holds all of one."""

import torch
from torch import Tensor, nn

from drivetrain_backends.fsdp.dtypes import DtypePlan
from drivetrain_backends.modules.packed_weights import is_wrapper
from drivetrain_precision.dtypes.dtype_policy import HALF
from drivetrain_precision.dtypes.holding import held_dtype


def is_plain(parameter: Tensor) -> bool:
    """Return whether every rank keeps the full parameter: scalars, integers, empty and packed ones."""
    is_skipped = parameter.dim() == 0 or not parameter.numel() or not parameter.is_floating_point()
    return is_skipped or is_wrapper(parameter)


class TensorStorage:
    """The storage of a model's tensors, which are identified by being the same objects."""

    def __init__(self, model: nn.Module, dtypes: DtypePlan, islands: frozenset[nn.Module]) -> None:
        self._dtypes = dtypes
        self._kept: set[Tensor] = set()
        for module in model.modules():
            if module in islands:
                self._kept.update(module.parameters(recurse=False))
                self._kept.update(module.buffers(recurse=False))

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a parameter or buffer is stored."""
        held = held_dtype(tensor, self._dtypes.held, is_island=tensor in self._kept)
        return torch.float32 if self.upcasts(tensor) else held

    def upcasts(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a trained parameter in half precision that is stored in fp32."""
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        return is_trained and self._dtypes.upcast and tensor.dtype in HALF

    def is_whole(self, parameter: Tensor) -> bool:
        """Return whether every rank keeps the full parameter.

        So for those of modules that stay in fp32: small ones, which a block could gather in its own dtype alone.
        """
        return is_plain(parameter) or parameter in self._kept
