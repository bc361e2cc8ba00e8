"""Give a model on the meta device tensors that autograd and autocast take for those of the CPU, without data."""

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_dispatch.compat import BUFFERS, PARAMETERS


def give_fake_tensors(model: nn.Module) -> None:
    """Exchange a model's tensors for ones of the CPU that have no data; tied tensors stay tied.

    The caller is in the context of a `FakeTensorMode`. Meta tensors themselves would not do: autocast passes over
    them, and attention takes its slowest kernel, which holds all scores.

    Args:
        model: A model whose tensors are all on the meta device.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, whose id is free otherwise
    for module in model.modules():
        entries: Any
        for entries in (vars(module)[PARAMETERS], vars(module)[BUFFERS], vars(module)):
            for name, tensor in entries.items():
                if isinstance(tensor, Tensor):
                    made.setdefault(id(tensor), (tensor, _fake(tensor)))
                    entries[name] = made[id(tensor)][1]


def _fake(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
