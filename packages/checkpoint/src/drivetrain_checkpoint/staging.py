"""Copies of tensors in host memory that is used again at the next save, so that training may go on at once."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: of no dtype's alignment less


def on_host(tensor: Tensor) -> Tensor:
    """A contiguous tensor on the CPU of the same values: itself where it is one already."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


class HostBuffer:
    """Memory for copies of tensors; pinned where they come from an accelerator.

    It grows to the largest save and stays: the first save pays for the pages, later ones only for the copy.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def size_bytes(self) -> int:
        """Of the memory."""
        return self._memory.numel()

    def stage(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors; what the last call gave is overwritten. Changes to the originals do not show any more.

        Returns:
            Contiguous tensors on the CPU.
        """
        starts = [0]
        for tensor in tensors:
            size_bytes = tensor.numel() * tensor.element_size()
            starts.append(starts[-1] + -(-size_bytes // _ALIGNMENT) * _ALIGNMENT)
        accelerated = any(tensor.device.type != "cpu" for tensor in tensors)
        pin = accelerated and torch.cuda.is_available()
        if self._memory.numel() < starts[-1] or (pin and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # first give back, then take
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
        staged: list[Tensor] = []
        for tensor, start in zip(tensors, starts, strict=False):
            size_bytes = prod(tensor.shape) * tensor.element_size()
            copy = self._memory[start : start + size_bytes].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor.detach(), non_blocking=pin)
            staged.append(copy)
        if pin:
            torch.accelerator.synchronize()
        return staged
