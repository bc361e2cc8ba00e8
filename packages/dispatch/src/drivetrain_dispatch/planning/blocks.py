"""Divide a model into blocks, each of which is placed on one device as a whole."""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from drivetrain_dispatch.model.model_layout import ModelLayout, enclosing_modules, identity, listed


class Block(NamedTuple):
    """A part of a model that is placed as a whole: a module, or a tensor of a module that is divided."""

    name: str
    size_bytes: int  # the bytes of its tensors; a tensor that an earlier block shares counts only there
    # The index of the first block that shares a tensor with it, directly or through others; its own index
    # if there is none.
    group: int
    # The bytes of each unit in it, fetched one by one if it is offloaded; () to fetch the block at once.
    units: tuple[int, ...] = ()
    # The bytes of its tensors that stay on the device that computes, wherever the others are kept.
    stay_bytes: int = 0
    # The bytes of its units that enclose other units: they are fetched before those and stay in use as
    # long as those.
    around_bytes: int = 0
    end: int = -1  # the index of the block with which the enclosing units are released; -1 for this block

    @property
    def coming(self) -> tuple[int, ...]:
        """The bytes of each unit that is fetched separately."""
        return self.units or (self.size_bytes - self.stay_bytes - self.around_bytes,)

    @property
    def need_bytes(self) -> int:
        """The bytes of the window that fetching the block needs."""
        return self.around_bytes + max(self.coming)


def blocks_of(
    layout: ModelLayout, *, no_split: Collection[str] = (), offload_buffers: bool = True
) -> list[Block]:
    """Return the blocks of a model, in its order. Pure; works on the meta device.

    A module is a block if its class must not be split, if its weights are fetched all at once, or if it has no
    submodules. Any other module is divided into its own tensors and its submodules. Buffers that are not offloaded
    stay on the device that computes.
    """
    kept = frozenset(listed(no_split))
    modules = layout.modules
    if absent := sorted(kept.difference({type(module).__name__ for module in modules.values()})):
        warnings.warn(
            f"no_split_module_classes: the model has no module of class {', '.join(absent)}; classes are named as "
            "type(module).__name__ does",
            stacklevel=2,
        )
    stays = layout.running_statistics if offload_buffers else layout.buffers.keys()
    undivided = layout.undivided.union(
        name for name, module in modules.items() if kept and type(module).__name__ in kept
    )
    found, places = _number_blocks(list(modules), undivided, layout.tensors)
    at = [places[name] if name in places else places[name.rpartition(".")[0]] for name in layout.tensors]
    units = [None if name in stays else unit for name, unit in layout.unit_names.items()]
    return _sum_blocks(found, at, layout.tensors.values(), layout.sizes.values(), units)


def _sum_blocks(
    found: Sequence[str],
    at: Sequence[int],
    tensors: Iterable[Tensor],
    bytes_of: Iterable[int],
    units_of: Sequence[str | None],
) -> list[Block]:
    """Return the blocks, summed over their tensors."""
    sizes, stay_sizes = [0] * len(found), [0] * len(found)
    units: list[dict[str, int]] = [{} for _ in found]
    groups = list(range(len(found)))
    holders: dict[object, int] = {}  # the first block of each tensor
    for index, tensor, size_bytes, unit in zip(at, tensors, bytes_of, units_of, strict=True):
        key = identity(tensor)
        if key in holders:
            one, other = sorted((_find_first(groups, holders[key]), _find_first(groups, index)))
            groups[other] = one
        else:
            holders[key] = index
            sizes[index] += size_bytes
            stay_sizes[index] += size_bytes if unit is None else 0
        if unit is not None:
            units[index][unit] = units[index].get(unit, 0) + size_bytes
    # The last block inside each unit that encloses blocks.
    wanted = {unit for name, each in zip(found, units, strict=True) for unit in each if unit != name}
    ends: dict[str, int] = {}
    for index in range(len(found) - 1, -1, -1) if wanted else ():
        for outer in enclosing_modules(found[index]):
            if outer in wanted:
                ends.setdefault(outer, index)
    return [
        _add_units(
            Block(name, sizes[index], _find_first(groups, index), (), stay_sizes[index]), units[index], ends
        )
        for index, name in enumerate(found)
    ]


def _add_units(block: Block, units: Mapping[str, int], ends: Mapping[str, int]) -> Block:
    """Return a block with its units and the bytes of the units around it."""
    if not units:
        return block
    if len(units) == 1:
        ((unit, unit_bytes),) = units.items()
        if unit != block.name and not unit.startswith(_prefix(block.name)):
            return block._replace(units=(0,), around_bytes=unit_bytes, end=ends[unit])
        # A block of a single unit needs no tuple: there may be 100,000 of them.
        return (
            block
            if unit_bytes + block.stay_bytes == block.size_bytes
            else block._replace(units=(unit_bytes,))
        )
    ordered = sorted(units, key=lambda unit: unit.split("."))  # what is inside a unit follows it
    around = {unit for unit, after in pairwise(ordered) if after.startswith(_prefix(unit))}
    alone = tuple(unit_bytes for unit, unit_bytes in units.items() if unit not in around)
    return block._replace(units=alone or (0,), around_bytes=sum(units[unit] for unit in around))


def _number_blocks(
    names: Sequence[str], undivided: Collection[str], tensors: Iterable[str]
) -> tuple[list[str], dict[str, int]]:
    """Return the blocks' names, and each module's block index, also for tensors of divided modules."""
    divided = {name for name, after in pairwise(names) if after.startswith(_prefix(name))}
    own: dict[str, list[str]] = {}
    for name in tensors:
        if (outer := name.rpartition(".")[0]) in divided:
            own.setdefault(outer, []).append(name)
    found: list[str] = []
    places: dict[str, int] = {}
    inside: str | None = None  # the prefix of names inside the last block
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
    return f"{name}." if name else ""


def _find_first(groups: list[int], index: int) -> int:
    while groups[index] != index:
        index = groups[index]
    return index
