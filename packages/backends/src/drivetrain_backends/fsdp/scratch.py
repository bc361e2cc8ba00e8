"""One piece of memory that every block is made whole in, one after the other."""

from collections.abc import Iterable

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, as torch aligns tensors on the CPU


class Scratch:
    """Memory for the largest block.

    Blocks that each take and free memory of their own would leave a hole between their shards, which allocators fill
    badly: on the CPU the holes of a model of 400 MiB came to 275 MiB.

    Args:
        device: Where blocks are made whole.
        sizes: How many bytes each block needs; see `room_for`.
    """

    def __init__(self, device: torch.device, sizes: Iterable[int]) -> None:
        self._memory = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)
        self._used = 0

    def clear(self) -> None:
        """Begin a block: what was handed out before is not needed any more."""
        self._used = 0

    def like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of a tensor's shape."""
        size = tensor.numel() * dtype.itemsize
        found = self._memory[self._used : self._used + size].view(dtype).view(tensor.shape)
        self._used += room_for(tensor, dtype)
        return found


def room_for(tensor: Tensor, dtype: torch.dtype) -> int:
    """How many bytes `Scratch.like` takes."""
    return -(-tensor.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
