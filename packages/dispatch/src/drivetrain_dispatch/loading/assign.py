"""What a load does to a model, once all values are there: made ready first, so that the doing cannot fail."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_dispatch.files.weight_source import WeightSource
from drivetrain_dispatch.loading.load_plan import Arrival
from drivetrain_dispatch.loading.quantize_on_load import Packing
from drivetrain_dispatch.model.dtensor import divided_like, is_divided, put_part
from drivetrain_dispatch.model.sizes import named_tensors
from drivetrain_dispatch.model.tensor_subclass import takes
from drivetrain_dispatch.quantization.protocol import Quantization


class Change(NamedTuple):
    """A tensor of the model and its value: given to `kept`, or put in its place under all names; or so a module."""

    names: tuple[str, ...]
    kept: Tensor | None
    value: Tensor | nn.Module


def changes_of(
    model: nn.Module,
    arrivals: Sequence[Arrival],
    targets: Mapping[str, Tensor],
    files: Mapping[str, WeightSource],
    packing: Packing,
) -> list[Change]:
    """What is to be done to a model.

    Args:
        model: The model.
        arrivals: What gets values.
        targets: Those that were read, by the checkpoint's name.
        files: Of those that stay on disk, by the checkpoint's name.
        packing: Those that were packed.
    """
    by_name = dict(named_tensors(model))
    layers: list[Change] = []  # these first: what else a layer has is put into the one that takes its place
    changes: list[Change] = []
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


def _change(arrival: Arrival, old: Tensor, value: Tensor) -> Change:
    """A buffer is replaced, and so is a parameter that can hold no such value; any other only gets it."""
    if not isinstance(old, nn.Parameter):
        return Change(arrival.names, None, value)
    learns = old.requires_grad and (value.is_floating_point() or value.is_complex())
    if arrival.box is not None:
        if old.is_meta:
            return Change(arrival.names, None, divided_like(old, value, requires_grad=learns))
        return Change(arrival.names, old, value)
    if learns == old.requires_grad and takes(old, value):
        return Change(arrival.names, old, value)
    new = type(old)(value, requires_grad=learns)  # a subclass takes what its base takes
    vars(new).update(vars(old))
    return Change(arrival.names, None, new)


def _packed_change(
    model: nn.Module, names: tuple[str, ...], quantization: Quantization | None, weight: nn.Parameter
) -> Change:
    """The layer that computes with a packed weight in place of another, or its weight."""
    if quantization is None:
        return Change(names, None, weight)
    layers = tuple(name.rpartition(".")[0] for name in names)
    linear = model.get_submodule(layers[0])
    assert isinstance(linear, nn.Linear)
    layer = quantization.layer(linear, weight)
    return Change(names, None, weight) if layer is None else Change(layers, None, layer)


def apply_changes(model: nn.Module, changes: Sequence[Change]) -> None:
    """Change a model in place."""
    for names, kept, value in changes:
        if kept is not None and isinstance(value, Tensor):
            if is_divided(kept):
                put_part(kept, value)
            else:
                kept.data = value
        else:
            for name in names:
                module, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(module), leaf, value)
