"""Assign loaded values to a model; all changes are prepared first, so that applying them cannot fail."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_dispatch.loading.load_plan import PlannedTensor
from drivetrain_dispatch.loading.quantize_on_load import Packing
from drivetrain_dispatch.loading.weight_source import WeightSource
from drivetrain_dispatch.model.dtensor import divided_like, put_part
from drivetrain_dispatch.model.sizes import named_tensors
from drivetrain_dispatch.model.tensor_subclass import takes
from drivetrain_dispatch.quantization.protocol import Quantization
from drivetrain_weights.tensor_box import is_dtensor


class Assignment(NamedTuple):
    """A change to a model: `kept` gets the value; if it is None, the value replaces the tensor or module `names`."""

    names: tuple[str, ...]
    kept: Tensor | None
    value: Tensor | nn.Module


def changes_of(
    model: nn.Module,
    arrivals: Sequence[PlannedTensor],
    targets: Mapping[str, Tensor],
    files: Mapping[str, WeightSource],
    packing: Packing,
) -> list[Assignment]:
    """Return the changes that a load makes to a model.

    Args:
        model: The model to change.
        arrivals: The tensors that get values.
        targets: The values that were read, by the checkpoint's name.
        files: The files of the tensors that stay on the disk, by the checkpoint's name.
        packing: The weights that were packed.
    """
    by_name = dict(named_tensors(model))
    layers: list[Assignment] = []  # first, so that a layer's other tensors go into the layer that replaces it
    changes: list[Assignment] = []
    for arrival in arrivals:
        if arrival.is_packed:
            weight = packing.weights[arrival.stored]
            layers.append(_packed_change(model, arrival.names, packing.quantization, weight))
            continue
        if arrival.is_read:
            value = targets[arrival.stored]
        elif arrival.place == "disk":
            value = files[arrival.stored].tensor(arrival.stored)
        else:
            value = torch.empty(arrival.shape, dtype=arrival.dtype, device="meta")
        changes.append(_change(arrival, by_name[arrival.names[0]], value))
    return layers + changes


def _change(arrival: PlannedTensor, old: Tensor, value: Tensor) -> Assignment:
    """Return the change for one tensor: buffers, and parameters that cannot hold the value, are replaced."""
    if not isinstance(old, nn.Parameter):
        return Assignment(arrival.names, None, value)
    learns = old.requires_grad and (value.is_floating_point() or value.is_complex())
    if arrival.box is not None:
        if old.is_meta:
            return Assignment(arrival.names, None, divided_like(old, value, requires_grad=learns))
        return Assignment(arrival.names, old, value)
    if learns == old.requires_grad and takes(old, value):
        return Assignment(arrival.names, old, value)
    new = type(old)(value, requires_grad=learns)  # a subclass takes the arguments of nn.Parameter
    vars(new).update(vars(old))
    return Assignment(arrival.names, None, new)


def _packed_change(
    model: nn.Module, names: tuple[str, ...], quantization: Quantization | None, weight: nn.Parameter
) -> Assignment:
    """Return the change for a packed weight: a new weight, or a new layer that computes with it."""
    if quantization is None:
        return Assignment(names, None, weight)
    layers = tuple(name.rpartition(".")[0] for name in names)
    linear = model.get_submodule(layers[0])
    assert isinstance(linear, nn.Linear)
    layer = quantization.layer(linear, weight)
    return Assignment(names, None, weight) if layer is None else Assignment(layers, None, layer)


def apply_changes(model: nn.Module, changes: Sequence[Assignment]) -> None:
    """Apply changes to a model in place."""
    for names, kept, value in changes:
        if kept is not None and isinstance(value, Tensor):
            if is_dtensor(kept):
                put_part(kept, value)
            else:
                kept.data = value
        else:
            for name in names:
                module, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(module), leaf, value)
