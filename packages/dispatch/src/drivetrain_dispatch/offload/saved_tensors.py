"""Have autograd save references to fetched weights, which are fetched again for the backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from drivetrain_dispatch.compat import version_of
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.offload.residency import OffloadedTensor


class _SavedWeight(NamedTuple):
    """A view of a weight that autograd has saved; its version shows later changes."""

    weight: OffloadedTensor
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _SavedActivation(NamedTuple):
    """A saved tensor that is no weight, with its version: under saved-tensor hooks torch does not detect changes."""

    tensor: Tensor
    version: int


def save_references(
    find_in_use: Callable[[Tensor], OffloadedTensor | None], fetch: Callable[[OffloadedTensor], Tensor]
) -> AbstractContextManager[None]:
    """Run the block with hooks that make autograd save references to the weights in use, not the weights."""

    def pack(tensor: Tensor) -> _SavedActivation | _SavedWeight:
        weight = find_in_use(tensor)
        if weight is None:
            # Autograd restores the graph itself; an output that is saved with its graph would hold itself forever.
            return _SavedActivation(tensor.detach(), version_of(tensor))
        size, offset = tuple(tensor.size()), int(tensor.storage_offset())
        return _SavedWeight(weight, weight.version, size, tensor.stride(), offset)

    def unpack(saved: _SavedActivation | _SavedWeight) -> Tensor:
        if isinstance(saved, _SavedActivation):
            if version_of(saved.tensor) != saved.version:
                raise OffloadedError(
                    f"a tensor of shape {list(saved.tensor.shape)} that the backward needs was changed in place "
                    "after the forward used it: write x = x * 2 instead of x *= 2 there"
                )
            return saved.tensor
        if saved.weight.version != saved.version:
            raise OffloadedError(
                f"a weight of shape {list(saved.weight.tensor.shape)} was changed after the forward and before its "
                "backward: call backward() before optimizer.step(), or run the forward again"
            )
        values = fetch(saved.weight)
        return values.as_strided(saved.size, saved.stride, saved.offset)

    return saved_tensors_hooks(pack, unpack)
