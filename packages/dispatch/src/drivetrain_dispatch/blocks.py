"""A model as the parts that are placed: each goes to one device as a whole."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_dispatch.sizes import Sizes, identity, listed, named_tensors


class Block(NamedTuple):
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
    special_sizes: Mapping[str, int] | None = None,
) -> list[Block]:
    """The blocks of a model, in its order. Pure; works on the meta device.

    A module is a block if its class is not to be split, or if it has no modules of its own. Of any other, its own
    tensors and its modules are looked at.

    Args:
        model: The model.
        no_split: Names of module classes that stay whole. A warning names those that the model does not have, as
            transformers' `_no_split_modules` names classes of every model of a family.
        dtype: What floating-point and complex tensors will be converted to; None takes them as they are.
        special_dtypes: Dtypes of single tensors by name, which win over `dtype`.
        special_sizes: Bytes of single tensors by name, which win over dtypes.

    Raises:
        ValueError: A tensor is named that the model does not have.
    """
    kept = frozenset(listed(no_split))
    names: list[str] = []
    classes: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        names.append(name)
        classes.append(type(module).__name__)
    if absent := sorted(kept.difference(classes)):
        warnings.warn(
            f"no_split_module_classes: the model has no module of class {', '.join(absent)}; classes are named as "
            "type(module).__name__ does",
            stacklevel=2,
        )
    tensors: list[Tensor] = []
    names_of_tensors: list[str] = []  # two lists and no pairs: of 100,000 the collector would take long
    for name, tensor in named_tensors(model):
        names_of_tensors.append(name)
        tensors.append(tensor)
    found, places = _numbered(names, classes, kept, names_of_tensors)
    size_of = Sizes(names_of_tensors, dtype, special_dtypes, special_sizes)
    sizes = [0] * len(found)
    groups = list(range(len(found)))
    holders: dict[object, int] = {}  # of each tensor, the first block that has it
    for name, tensor in zip(names_of_tensors, tensors, strict=True):
        index = places[name] if name in places else places[name.rpartition(".")[0]]
        key = identity(tensor)
        if key in holders:
            _join(groups, holders[key], index)
        else:
            holders[key] = index
            sizes[index] += size_of(name, tensor)
    return [Block(name, sizes[index], _first(groups, index)) for index, name in enumerate(found)]


def _numbered(
    names: Sequence[str], classes: Sequence[str], kept: Collection[str], tensors: Sequence[str]
) -> tuple[list[str], dict[str, int]]:
    """The names of the blocks, and the index of the block in which each module and divided module's tensor is.

    Args:
        names: Of the modules, each followed by those in it; those of one that stands in two places twice.
        classes: Of the modules, the names.
        kept: Classes that stay whole.
        tensors: The names of all tensors.
    """
    divided = {name for name, after in pairwise(names) if after.startswith(_prefix(name))}
    own: dict[str, list[str]] = {}
    for name in tensors:
        if (outer := name.rpartition(".")[0]) in divided:
            own.setdefault(outer, []).append(name)
    found: list[str] = []
    places: dict[str, int] = {}
    inside: str | None = None  # how the names begin that are part of the last block
    for name, kind in zip(names, classes, strict=True):
        if inside is not None and name.startswith(inside):
            places[name] = len(found) - 1
        elif name not in divided or kind in kept:
            inside, places[name] = _prefix(name), len(found)
            found.append(name)
        else:
            for tensor in own.get(name, ()):
                places[tensor] = len(found)
                found.append(tensor)
    return found, places


def _prefix(name: str) -> str:
    """How the names of what is in a module begin."""
    return f"{name}." if name else ""


def _first(groups: list[int], index: int) -> int:
    while groups[index] != index:
        index = groups[index]
    return index


def _join(groups: list[int], one: int, other: int) -> None:
    one, other = sorted((_first(groups, one), _first(groups, other)))
    groups[other] = one
