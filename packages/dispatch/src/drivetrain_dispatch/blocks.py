"""A model as the parts that are placed: each goes to one device as a whole."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from drivetrain_dispatch.sizes import dtype_after, enclosing_modules, identity, named_tensors


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a model: a module, or a parameter or buffer of a module that is itself divided.

    Attributes:
        name: As the model calls it; `""` is the model itself.
        size_bytes: Of its tensors; one that an earlier block has too is counted there alone.
        group: The index of the first block that it shares a tensor with, be it through others; its own without any.
    """

    name: str
    size_bytes: int
    group: int


def blocks_of(
    model: nn.Module,
    *,
    no_split: Collection[str] = (),
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[Block]:
    """The blocks of a model, in its order. Pure; works on the meta device.

    A module is a block if its class is not to be split, or if it has no modules of its own. Of any other, its own
    tensors and its modules are looked at.

    Args:
        model: The model.
        no_split: Names of module classes that stay whole.
        dtype: What floating-point and complex tensors will be converted to; None takes them as they are.
        special_dtypes: Dtypes of single tensors by name, which win over `dtype`.

    Raises:
        ValueError: `no_split` names a class that the model does not have, or `special_dtypes` such a tensor.
    """
    kept = frozenset(no_split)
    if unknown := sorted(kept - {type(module).__name__ for module in model.modules()}):
        raise ValueError(
            f"no_split_module_classes={unknown}: the model has no module of such a class; name classes as "
            "type(module).__name__ does"
        )
    names = list(_names(model, kept))
    places = {name: index for index, name in enumerate(names)}
    sizes = [0] * len(names)
    groups = list(range(len(names)))
    holders: dict[object, int] = {}  # of each tensor, the first block that has it
    special = dict(special_dtypes or {})
    for name, tensor in named_tensors(model):
        index, chosen, key = _place_of(name, places), special.pop(name, None), identity(tensor)
        if key in holders:
            _join(groups, holders[key], index)
        else:
            holders[key] = index
            sizes[index] += tensor.numel() * dtype_after(tensor, dtype, chosen).itemsize
    if special:
        raise ValueError(
            f"special_dtypes={sorted(special)}: the model has no such parameter or buffer; see named_parameters()"
        )
    return [Block(name, sizes[index], _first(groups, index)) for index, name in enumerate(names)]


def _names(model: nn.Module, kept: frozenset[str]) -> Iterator[str]:
    """The names of the blocks, those of a module that stands in two places twice."""
    inside: str | None = None  # how the names begin that are part of the last block
    for name, module in model.named_modules(remove_duplicate=False):
        if inside is not None and name.startswith(inside):
            continue
        prefix = f"{name}." if name else ""
        if type(module).__name__ in kept or next(module.children(), None) is None:
            inside = prefix
            yield name
            continue
        for own, _ in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            yield prefix + own


def _place_of(name: str, places: Mapping[str, int]) -> int:
    """The index of the block that a tensor belongs to."""
    if name in places:
        return places[name]
    return next(places[outer] for outer in enclosing_modules(name) if outer in places)


def _first(groups: list[int], index: int) -> int:
    while groups[index] != index:
        index = groups[index]
    return index


def _join(groups: list[int], one: int, other: int) -> None:
    one, other = sorted((_first(groups, one), _first(groups, other)))
    groups[other] = one
