"""Have autograd save references to fetched weights, which are fetched again for the backward."""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.offload.residency import OffloadedTensor, version_of


class BackwardFetcher(Protocol):
    """The interface by which saved tensors get weights from the engine."""

    def find_in_use(self, tensor: Tensor) -> OffloadedTensor | None:
        """Return the offloaded tensor whose values a tensor is a view of."""
        ...

    def fetch_for_backward(self, weight: OffloadedTensor) -> Tensor:
        """Return the values of a weight, which stay for some time."""
        ...


class _SavedWeight(NamedTuple):
    """A view of a weight that autograd has saved; its version shows later changes."""

    weight: OffloadedTensor
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _SavedActivation(NamedTuple):
    """A saved tensor that is no weight; with saved-tensor hooks, torch does not check it for changes itself."""

    tensor: Tensor
    version: int


def save_references(fetcher: BackwardFetcher) -> AbstractContextManager[None]:
    """Run the block with hooks by which autograd saves references to weights in use, not the weights."""

    def pack(tensor: Tensor) -> _SavedActivation | _SavedWeight:
        weight = fetcher.find_in_use(tensor)
        if weight is None:
            # Autograd restores the graph itself; an output that is saved with its graph would hold itself forever.
            return _SavedActivation(tensor.detach(), version_of(tensor))
        version = version_of(weight.tensor)
        return _SavedWeight(
            weight, version, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        )

    def unpack(saved: _SavedActivation | _SavedWeight) -> Tensor:
        if isinstance(saved, _SavedActivation):
            if version_of(saved.tensor) != saved.version:
                raise OffloadedError(
                    f"a tensor of shape {list(saved.tensor.shape)} that the backward needs was changed in place "
                    "after the forward used it: write x = x * 2 instead of x *= 2 there"
                )
            return saved.tensor
        if version_of(saved.weight.tensor) != saved.version:
            raise OffloadedError(
                f"a weight of shape {list(saved.weight.tensor.shape)} was changed after the forward and before its "
                "backward: call backward() before optimizer.step(), or run the forward again"
            )
        values = fetcher.fetch_for_backward(saved.weight)
        return values.as_strided(saved.size, saved.stride, saved.offset)

    return saved_tensors_hooks(pack, unpack)
