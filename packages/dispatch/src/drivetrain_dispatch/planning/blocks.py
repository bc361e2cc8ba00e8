"""A model as the parts that are placed: each goes to one device as a whole."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_dispatch.model.sizes import Sizes, enclosing_modules, identity, listed
from drivetrain_dispatch.model.units import UnitNames
from drivetrain_dispatch.planning.placement import running_statistics


class Block(NamedTuple):
    """A part of a model: a module, or a parameter or buffer of a module that is itself divided.

    Attributes:
        name: As the model calls it; `""` is the model itself.
        size_bytes: Of its tensors; one that an earlier block has too is counted there alone.
        group: The index of the first block that it shares a tensor with, be it through others; its own without any.
        units: The bytes of each unit in it, as they come if it does not stay; () for all of it at once.
        stay_bytes: Of its tensors, those that stay on the device that computes wherever the others are kept.
        around_bytes: Of units that have others inside them: they come first, and are in use while those are.
        end: The index of the block with which those leave; -1 for itself.
    """

    name: str
    size_bytes: int
    group: int
    units: tuple[int, ...] = ()
    stay_bytes: int = 0
    around_bytes: int = 0
    end: int = -1

    @property
    def coming(self) -> tuple[int, ...]:
        """The bytes of each unit that comes by itself."""
        return self.units or (self.size_bytes - self.stay_bytes - self.around_bytes,)

    @property
    def need_bytes(self) -> int:
        """The window that it needs to come."""
        return self.around_bytes + max(self.coming)


def blocks_of(
    model: nn.Module,
    *,
    no_split: Collection[str] = (),
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    special_sizes: Mapping[str, int] | None = None,
    whole: Collection[str] = (),
    offload_buffers: bool = True,
) -> list[Block]:
    """The blocks of a model, in its order. Pure; works on the meta device.

    A module is a block if its class is not to be split, if its weights come at once, or if it has no modules of its
    own. Of any other, its own tensors and its modules are looked at.

    Args:
        model: The model.
        no_split: Names of module classes that stay whole. A warning names those that the model does not have, as
            transformers' `_no_split_modules` names classes of every model of a family.
        dtype: What floating-point and complex tensors will be converted to; None takes them as they are.
        special_dtypes: Dtypes of single tensors by name, which win over `dtype`.
        special_sizes: Bytes of single tensors by name, which win over dtypes.
        whole: Names of module classes whose weights come all at once.
        offload_buffers: Whether buffers come and go too; else they stay on the device that computes.

    Raises:
        ValueError: A tensor is named that the model does not have, or a class in `whole`.
    """
    kept = frozenset(listed(no_split))
    modules = dict(model.named_modules(remove_duplicate=False))
    unit_of = UnitNames(modules, whole)
    if absent := sorted(kept.difference({type(module).__name__ for module in modules.values()})):
        warnings.warn(
            f"no_split_module_classes: the model has no module of class {', '.join(absent)}; classes are named as "
            "type(module).__name__ does",
            stacklevel=2,
        )
    tensors: list[Tensor] = []
    names_of_tensors: list[str] = []  # two lists and no pairs: of 100,000 the collector would take long
    _append(modules, "_parameters", names_of_tensors, tensors)
    num_parameters = len(tensors)
    _append(modules, "_buffers", names_of_tensors, tensors)
    stays = set(names_of_tensors[num_parameters:])
    if stays and offload_buffers:
        stays = running_statistics(model)
    names = list(modules)
    undivided = unit_of.at_once.union(
        name for name, module in modules.items() if kept and type(module).__name__ in kept
    )
    found, places = _numbered(names, undivided, names_of_tensors)
    at = [places[name] if name in places else places[name.rpartition(".")[0]] for name in names_of_tensors]
    size_of = Sizes(names_of_tensors, dtype, special_dtypes, special_sizes)
    bytes_of = [size_of(name, tensor) for name, tensor in zip(names_of_tensors, tensors, strict=True)]
    units = [None if name in stays else unit_of(name) for name in names_of_tensors]
    return _summed(found, at, tensors, bytes_of, units)


def _summed(
    found: Sequence[str],
    at: Sequence[int],
    tensors: Sequence[Tensor],
    bytes_of: Sequence[int],
    units_of: Sequence[str | None],
) -> list[Block]:
    """The blocks, of what is known of each tensor.

    Args:
        found: The names of the blocks.
        at: The block of each tensor.
        tensors: All of them.
        bytes_of: What each takes.
        units_of: The unit of each; None for one that stays.
    """
    sizes, stay_sizes = [0] * len(found), [0] * len(found)
    units: list[dict[str, int]] = [{} for _ in found]
    groups = list(range(len(found)))
    holders: dict[object, int] = {}  # of each tensor, the first block that has it
    for index, tensor, size_bytes, unit in zip(at, tensors, bytes_of, units_of, strict=True):
        key = identity(tensor)
        if key in holders:
            _join(groups, holders[key], index)
        else:
            holders[key] = index
            sizes[index] += size_bytes
            stay_sizes[index] += size_bytes if unit is None else 0
        if unit is not None:
            units[index][unit] = units[index].get(unit, 0) + size_bytes
    ends = _ends(found, units)
    return [
        _with_units(
            Block(name, sizes[index], _first(groups, index), (), stay_sizes[index]), units[index], ends
        )
        for index, name in enumerate(found)
    ]


def _append(
    modules: Mapping[str, nn.Module], attribute: str, names: list[str], tensors: list[Tensor]
) -> None:
    """Append the tensors of modules, and their names: torch's iterators would go through all modules again."""
    for outer, module in modules.items():
        for name, tensor in vars(module)[attribute].items():
            if tensor is not None:
                names.append(f"{outer}.{name}" if outer else name)
                tensors.append(tensor)


def _ends(found: Sequence[str], units: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Of each unit that is around blocks, the index of the last of them."""
    wanted = {unit for name, each in zip(found, units, strict=True) for unit in each if unit != name}
    ends: dict[str, int] = {}
    for index in range(len(found) - 1, -1, -1) if wanted else ():
        for outer in enclosing_modules(found[index]):
            if outer in wanted:
                ends.setdefault(outer, index)
    return ends


def _with_units(block: Block, units: Mapping[str, int], ends: Mapping[str, int]) -> Block:
    """Add to a block which units come in it, and which are around it.

    Args:
        block: The block, with what stays of it.
        units: The bytes of each of its units, by name.
        ends: For units around blocks, the index of the last block in them.
    """
    if not units:
        return block
    if len(units) == 1:
        ((unit, unit_bytes),) = units.items()
        if unit != block.name and not unit.startswith(_prefix(block.name)):
            return block._replace(units=(0,), around_bytes=unit_bytes, end=ends[unit])
        # A block of one unit alone needs no list: there may be 100,000 of them.
        return (
            block
            if unit_bytes + block.stay_bytes == block.size_bytes
            else block._replace(units=(unit_bytes,))
        )
    ordered = sorted(units, key=lambda unit: unit.split("."))  # what is inside a unit follows it
    around = {unit for unit, after in pairwise(ordered) if after.startswith(_prefix(unit))}
    alone = tuple(unit_bytes for unit, unit_bytes in units.items() if unit not in around)
    return block._replace(units=alone or (0,), around_bytes=sum(units[unit] for unit in around))


def _numbered(
    names: Sequence[str], undivided: Collection[str], tensors: Sequence[str]
) -> tuple[list[str], dict[str, int]]:
    """The names of the blocks, and the index of the block in which each module and divided module's tensor is.

    Args:
        names: Of the modules, each followed by those in it; those of one that stands in two places twice.
        undivided: Those that stay whole.
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
    for name in names:
        if inside is not None and name.startswith(inside):
            places[name] = len(found) - 1
        elif name not in divided or name in undivided:
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
