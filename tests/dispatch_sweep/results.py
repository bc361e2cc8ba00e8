"""What the sweep holds against each other: every tensor that a model gives, and its gradients."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_LINE = 64  # bytes: where a tensor begins within these decides which of the host's kernels add it up


def tensors_of(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Go through the tensors of an output, with what they are called in it."""
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from tensors_of(value, f"{name}.{key}")
    elif isinstance(output, list | tuple):
        for index, value in enumerate(output):
            yield from tensors_of(value, f"{name}.{index}")
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from tensors_of(getattr(output, field.name), f"{name}.{field.name}")


def difference(given: Any, expected: Any) -> str | None:
    """Return how two outputs differ, bit by bit; None where they do not."""
    ours, theirs = dict(tensors_of(given)), dict(tensors_of(expected))
    if not theirs:
        raise ValueError(f"the output has no tensors: {type(expected).__name__}")
    if ours.keys() != theirs.keys():
        return f"other tensors: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    worst, where = 0.0, ""
    for name, tensor in theirs.items():
        if ours[name].dtype != tensor.dtype or ours[name].shape != tensor.shape:
            return f"{name} is {ours[name].dtype} {tuple(ours[name].shape)}, not {tensor.dtype} {tuple(tensor.shape)}"
        if not torch.equal(ours[name].nan_to_num(7.0), tensor.nan_to_num(7.0)):
            off = float((ours[name].double() - tensor.double()).abs().nan_to_num(torch.inf).max())
            worst, where = max((worst, where), (off or torch.inf, name))
    return f"{where or 'output'} by {worst:.0e}" if worst else None


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name, and the buffers that a forward in training may have changed."""
    return {
        **{f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None},
        **dict(model.named_buffers()),
    }


def at_the_addresses_of(model: nn.Module, other: nn.Module) -> nn.Module:
    """Return a copy of a model whose tensors begin where those of another do within a line of the cache."""
    copied = copy.deepcopy(model)
    places = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    for name, tensor in (*copied.named_parameters(), *copied.named_buffers()):
        if tensor.numel():
            tensor.data = _beginning_at(places[name].data_ptr() % _LINE, tensor.data)
    return copied


def _beginning_at(offset: int, tensor: Tensor) -> Tensor:
    raw = torch.empty(tensor.nbytes + 2 * _LINE, dtype=torch.uint8)
    start = (offset - raw.data_ptr()) % _LINE
    placed = raw[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return placed.copy_(tensor)
