"""The tensors that a load fills, and the changes to the model, prepared so that applying them cannot fail."""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.model.quantized_tensor import is_quantized, takes
from drivetrain_weights.tensor_box import Box, box_of_dtensor, is_dtensor


class LoadTarget:
    """A tensor of a model for which a load has a value; this class is for plain tensors."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor

    @property
    def home(self) -> torch.device:
        """The device of the tensor; for a tensor without memory, the device to allocate it on."""
        return torch.device("cpu") if self.tensor.is_meta else self.tensor.device

    def box(self) -> Box | None:
        """Return the position of this rank's shard in the whole tensor; None if it is not sharded."""
        return None

    def keeps_object(self, value: Tensor) -> bool:
        """Return whether the tensor can take a value and stay the same object; a buffer is always replaced."""
        return (
            isinstance(self.tensor, nn.Parameter)
            and self._learns(value) == self.tensor.requires_grad
            and takes(self.tensor, value)
        )

    def put(self, value: Tensor) -> None:
        """Write a value into the tensor in place."""
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


class ShardedTarget(LoadTarget):
    """A tensor that is sharded over ranks (torch's DTensor); its values are those of this rank's shard."""

    @property
    def home(self) -> torch.device:
        """The device of the shard, or of its mesh if it has no memory yet."""
        sharded: Any = self.tensor
        return torch.device(sharded.device_mesh.device_type) if self.tensor.is_meta else self.tensor.device

    def box(self) -> Box | None:
        """Return the position of this rank's shard in the whole tensor."""
        return box_of_dtensor(self.tensor, name=repr(self.name))

    def keeps_object(self, value: Tensor) -> bool:  # noqa: ARG002 the shard takes any value
        """Return whether the tensor has memory: views of this memory, as FSDP has, must stay valid."""
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


def load_target(name: str, tensor: Tensor) -> LoadTarget:
    """Return the load target for a plain or a sharded tensor."""
    if is_quantized(tensor):
        raise ValueError(
            f"{name!r} is quantised already: load into the model as it was before, and give quantization=... for its "
            "weights to be packed as they come"
        )
    return ShardedTarget(name, tensor) if is_dtensor(tensor) else LoadTarget(name, tensor)


class Assignment(NamedTuple):
    """A change to a model."""

    names: tuple[str, ...]
    value: Tensor | nn.Module
    # The tensor that gets the value in place; None to replace what has the names.
    kept: LoadTarget | None = None


def assignment(names: tuple[str, ...], target: LoadTarget, value: Tensor) -> Assignment:
    """Return the change that gives a tensor of the model a value, in place if torch allows it."""
    if target.keeps_object(value):
        return Assignment(names, value, target)
    return Assignment(names, target.replaced_by(value))


def apply_assignments(model: nn.Module, assignments: Sequence[Assignment]) -> None:
    """Apply changes to a model in place."""
    # Layers come first, so that a layer's other tensors go into the layer that replaces it.
    for names, value, kept in sorted(assignments, key=lambda each: not isinstance(each.value, nn.Module)):
        if kept is not None and isinstance(value, Tensor):
            kept.put(value)
            continue
        for name in names:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, value)


def refuse_to_save(model: nn.Module) -> None:
    """Make `save_pretrained` of a model with packed weights raise, if it has such a method."""

    def refuse(*_: object, **__: object) -> NoReturn:
        # The library would write packed weights that nothing reads, maybe over the full ones.
        raise OffloadedError(
            "the weights of this model are packed, and save_pretrained would write what no library reads: load the "
            "model without quantization to save it, or save model.state_dict() by torch.save"
        )

    if hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = refuse
