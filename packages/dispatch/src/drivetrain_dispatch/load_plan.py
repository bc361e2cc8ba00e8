"""Which tensor of a checkpoint becomes which of a model, on what device and in what dtype. Pure."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drivetrain_dispatch.device_map import Place
from drivetrain_dispatch.misfits import Misfits, Stored
from drivetrain_dispatch.sizes import dtype_after, named_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A tensor of the model that gets values.

    Attributes:
        names: All that the model calls it.
        stored: What the checkpoint calls it.
        copies: What else the checkpoint has for its names; must be equal.
        shape: Its dims.
        stored_dtype: In the checkpoint.
        dtype: In the model.
        place: Where it goes.
    """

    names: tuple[str, ...]
    stored: str
    copies: tuple[str, ...]
    shape: tuple[int, ...]
    stored_dtype: torch.dtype
    dtype: torch.dtype
    place: Place

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """What it takes where it goes."""
        return self.numel * self.dtype.itemsize

    @property
    def is_read(self) -> bool:
        """Whether it gets memory, rather than staying in the file or without values."""
        return self.place != "disk" and self.place.type != "meta"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a load does.

    Attributes:
        arrivals: What gets values, in the order of the checkpoint.
        missing: Names of the model that the checkpoint lacks.
        unexpected: Names of the checkpoint, after renaming, that the model lacks.
    """

    arrivals: tuple[Arrival, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def plan_load(
    model: nn.Module,
    stored: Mapping[str, Stored],
    places: Mapping[str, Place],
    *,
    checkpoint: str,
    dtype: torch.dtype | None = None,
    special_dtypes: Mapping[str, torch.dtype] | None = None,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
) -> LoadPlan:
    """Plan a load, and check all that can be known before anything is read. Works on the meta device.

    Args:
        model: The model.
        stored: What the checkpoint holds, in its order.
        places: Where each tensor of the model goes, by every name.
        checkpoint: What errors call it.
        dtype: What floating-point and complex tensors become; None leaves the model's.
        special_dtypes: Dtypes of single tensors by name, which win over `dtype`.
        strict: Whether the checkpoint must have the model's names and no others.
        rename: From a name of the checkpoint to the model's; None for what is to be left out.

    Raises:
        WeightsMismatchError: Names or shapes do not fit, or a tensor would stay on the meta device.
        ValueError: `rename` gives two tensors one name, or `special_dtypes` names one that the model does not have.
    """
    found = _renamed(stored, rename)
    special = special_dtypes or {}
    groups = _tensors_by_names(model)
    if unknown := sorted(special.keys() - {name for names, _ in groups for name in names}):
        raise ValueError(
            f"special_dtypes={unknown}: the model has no such parameter or buffer; see named_parameters()"
        )
    saved = model.state_dict(keep_vars=True).keys()
    misfits = Misfits(checkpoint=checkpoint, strict=strict)
    arrivals: list[Arrival] = []
    for names, tensor in groups:
        kept = [name for name in names if name in saved]
        there = [name for name in kept if name in found]
        chosen = next((special[name] for name in names if name in special), None)
        wanted = Stored(tuple(tensor.shape), dtype_after(tensor, dtype, chosen))
        place = _one_place([places[name] for name in names])
        if not there:
            misfits.absent(
                names[0], wanted, persistent=bool(kept), empty=tensor.is_meta and not _is_meta(place)
            )
            continue
        for name in there:
            misfits.compare(name, stored[found[name]], wanted, converts=chosen is not None)
        first, *copies = (found[name] for name in there)
        for copy in copies:
            misfits.compare_copies(there, stored[first], stored[copy])
        arrivals.append(
            Arrival(
                names=names, stored=first, copies=tuple(copies), shape=wanted.shape,
                stored_dtype=stored[first].dtype, dtype=wanted.dtype, place=place,
            )
        )  # fmt: skip
    known = {name for names, _ in groups for name in names if name in saved}
    misfits.unexpected.update({name: stored[file] for name, file in found.items() if name not in known})
    misfits.check(known=known, found=found)
    order = {name: index for index, name in enumerate(stored)}
    arrivals.sort(key=lambda arrival: order[arrival.stored])
    return LoadPlan(
        arrivals=tuple(arrivals), missing=tuple(misfits.missing), unexpected=tuple(misfits.unexpected)
    )


def present_places(model: nn.Module) -> dict[str, Place]:
    """Where each tensor of a model is, by every name; those on the meta device go to the CPU."""
    return {
        name: torch.device("cpu") if tensor.is_meta else tensor.device
        for name, tensor in named_tensors(model)
    }


def _renamed(names: Collection[str], rename: Callable[[str], str | None] | None) -> dict[str, str]:
    """The checkpoint's name of each name that is to be looked for in the model."""
    found: dict[str, str] = {}
    for name in names:
        new = name if rename is None else rename(name)
        if new is None:
            continue
        if new in found:
            raise ValueError(
                f"rename: {found[new]!r} and {name!r} both become {new!r}: give each its own name"
            )
        found[new] = name
    return found


def _tensors_by_names(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """Each parameter and buffer once, with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def _one_place(places: Sequence[Place]) -> Place:
    """Where a tensor of several names goes: to the first device that one of them has, before it stays on disk."""
    for place in places:
        if place != "disk" and place.type != "meta":
            return place
    return places[0]


def _is_meta(place: Place) -> bool:
    return place != "disk" and place.type == "meta"
