"""The tensors of a model by the way in which they are stored, and what it takes to give each a value."""

from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_dispatch.model.dtensor import Box, box_of, is_divided
from drivetrain_dispatch.model.tensor_subclass import takes


class StoredTensor:
    """A tensor of a model that is stored plainly.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def home(self) -> torch.device:
        """The device that the tensor is on, or that it is allocated on if it has no memory yet."""
        return torch.device("cpu") if self.tensor.is_meta else self.tensor.device

    def box(self, name: str) -> Box | None:  # noqa: ARG002 a sharded tensor's error names it
        """Return the position of this rank's shard in the whole tensor; None if it is not sharded."""
        return None

    def keeps_object(self, value: Tensor) -> bool:
        """Return whether the tensor can get a value and stay the same object: a buffer is always replaced."""
        return (
            isinstance(self.tensor, nn.Parameter)
            and self._learns(value) == self.tensor.requires_grad
            and takes(self.tensor, value)
        )

    def put(self, value: Tensor) -> None:
        """Give the tensor a value in place."""
        self.tensor.data = value

    def replaced_by(self, value: Tensor) -> Tensor:
        """Return a tensor of the same kind with a value, without changing this one."""
        if not isinstance(self.tensor, nn.Parameter):
            return value
        # A subclass of nn.Parameter takes the same arguments; its own attributes, such as scales, are copied.
        new = type(self.tensor)(value, requires_grad=self._learns(value))
        vars(new).update(vars(self.tensor))
        return new

    def _learns(self, value: Tensor) -> bool:
        return self.tensor.requires_grad and (value.is_floating_point() or value.is_complex())


class ShardedTensor(StoredTensor):
    """A tensor that is sharded over ranks (torch's DTensor); its values are those of this rank's shard."""

    @property
    def home(self) -> torch.device:
        """The device that the shard is on, or that of its mesh if it has no memory yet."""
        sharded: Any = self.tensor
        return torch.device(sharded.device_mesh.device_type) if self.tensor.is_meta else self.tensor.device

    def box(self, name: str) -> Box | None:
        """Return the position of this rank's shard in the whole tensor.

        Raises:
            ValueError: The tensor has placements other than `Shard` and `Replicate`, or is not cut as `torch.chunk`
                cuts.
        """
        return box_of(name, self.tensor)

    def keeps_object(self, value: Tensor) -> bool:  # noqa: ARG002 the shard takes any value
        """Return whether the tensor has memory: the engine that sharded it keeps views of that."""
        return not self.tensor.is_meta

    def put(self, value: Tensor) -> None:
        """Write the values into the shard's memory."""
        sharded: Any = self.tensor
        with torch.no_grad():
            sharded.to_local().copy_(value)

    def replaced_by(self, value: Tensor) -> Tensor:
        """Return a tensor made of this rank's shard, with the same mesh and placements."""
        old: Any = self.tensor
        whole = type(old).from_local(
            value, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )
        if not isinstance(old, nn.Parameter):
            return whole
        return nn.Parameter(whole, requires_grad=self._learns(value))


def stored_tensor(tensor: Tensor) -> StoredTensor:
    """Return a tensor by the way in which it is stored."""
    return ShardedTensor(tensor) if is_divided(tensor) else StoredTensor(tensor)
