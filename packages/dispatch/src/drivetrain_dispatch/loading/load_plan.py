"""Plan which tensor of a checkpoint becomes which of a model, on what device and in what dtype. Pure."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_dispatch.loading.state_dict_diff import Misfits, Stored
from drivetrain_dispatch.model.dtensor import device_of
from drivetrain_dispatch.model.sizes import dtype_after, named_tensors
from drivetrain_dispatch.model.tensor_subclass import is_packed
from drivetrain_dispatch.planning.device_map import Place
from drivetrain_dispatch.planning.placement import running_statistics
from drivetrain_dispatch.quantization.protocol import Quantization, quantized_sizes
from drivetrain_weights.tensor_box import Box, box_of_dtensor, is_dtensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """A tensor of the model that gets values.

    Attributes:
        names: All names of the tensor in the model.
        stored: The name of the tensor in the checkpoint.
        copies: Further names in the checkpoint for the same tensor; their values must be equal.
        shape: The shape of the tensor, or of this rank's shard.
        stored_dtype: The dtype in the checkpoint.
        dtype: The dtype in the model.
        place: The device that the tensor goes to, or `"disk"`.
        box: The position of this rank's shard in the whole tensor; None if it is not sharded.
        packed_bytes: The bytes of the packed tensor; None if it is not packed.
    """

    names: tuple[str, ...]
    stored: str
    copies: tuple[str, ...]
    shape: tuple[int, ...]
    stored_dtype: torch.dtype
    dtype: torch.dtype
    place: Place
    box: Box | None = None
    packed_bytes: int | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """The bytes that the tensor takes in its place."""
        if self.packed_bytes is not None:
            return self.packed_bytes
        return self.numel * self.dtype.itemsize

    @property
    def is_read(self) -> bool:
        """True if the tensor gets memory, rather than staying in the file or without values."""
        return self.place != "disk" and self.place.type != "meta"

    @property
    def takes_room(self) -> bool:
        """True if the tensor takes room on a device, in memory or on the disk; False on the meta device."""
        return not _is_meta(self.place)

    @property
    def is_packed(self) -> bool:
        """True if the tensor is packed once it is read, wherever it goes."""
        return self.packed_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The plan of a load.

    Attributes:
        arrivals: The tensors that get values, in the order of the checkpoint.
        missing: Names of the model that the checkpoint lacks.
        unexpected: Names of the checkpoint, after renaming, that the model lacks.
    """

    arrivals: tuple[PlannedTensor, ...]
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
    quantization: Quantization | None = None,
) -> LoadPlan:
    """Plan a load, and check all that can be known before any tensor is read. Works on the meta device.

    Args:
        model: The model to load into.
        stored: The tensors of the checkpoint, in its order.
        places: The place of each tensor of the model, by every name.
        checkpoint: The name of the checkpoint in errors.
        dtype: The dtype for floating-point and complex tensors; None keeps the model's dtypes.
        special_dtypes: The dtypes of single tensors by name, which override `dtype`.
        strict: Whether the checkpoint must have exactly the model's names.
        rename: A function from a name in the checkpoint to one in the model; where it returns None, the tensor is
            skipped.
        quantization: How the weights of linear layers are packed; None does not pack them.

    Raises:
        WeightsMismatchError: Names or shapes do not fit, or a tensor would stay on the meta device.
        ValueError: `rename` maps two tensors to one name, `special_dtypes` has a name that the model lacks, a tensor
            is sharded in an unsupported way, or there is nothing to pack.
    """
    found = _renamed(stored, rename)
    special = special_dtypes or {}
    packs: dict[str, int] = {}
    if quantization is not None:
        packs = quantized_sizes(model, quantization, dtype=dtype, special_dtypes=special)
    tensors = _wanted(model, places, dtype, special)
    misfits = Misfits(checkpoint=checkpoint, strict=strict)
    written = running_statistics(model)
    arrivals = [
        arrival if _is_meta(arrival.place) else replace(arrival, packed_bytes=packs.get(arrival.names[0]))
        for wanted in tensors
        if (arrival := _arrival(wanted, stored, found, misfits, written)) is not None
    ]
    known = {name for wanted in tensors for name in wanted.saved}
    misfits.unexpected.update({name: stored[file] for name, file in found.items() if name not in known})
    misfits.check(known=known, found=found)
    order = {name: index for index, name in enumerate(stored)}
    arrivals.sort(key=lambda arrival: order[arrival.stored])
    return LoadPlan(
        arrivals=tuple(arrivals), missing=tuple(misfits.missing), unexpected=tuple(misfits.unexpected)
    )


def present_places(model: nn.Module) -> dict[str, Place]:
    """Return the place of each tensor of a model, by every name.

    A tensor on the meta device goes to the CPU, or to the device of its mesh.
    """
    places: dict[str, Place] = {}
    for name, tensor in named_tensors(model):
        without = device_of(tensor) if is_dtensor(tensor) else torch.device("cpu")
        places[name] = without if tensor.is_meta else tensor.device
    return places


class _Wanted(NamedTuple):
    """A tensor of the model: all its names, those in checkpoints, its shape and dtype to load, and its place."""

    names: tuple[str, ...]
    saved: tuple[str, ...]
    tensor: Tensor
    described: Stored
    converts: bool  # the user asked for exactly this dtype
    place: Place


def _wanted(
    model: nn.Module,
    places: Mapping[str, Place],
    dtype: torch.dtype | None,
    special: Mapping[str, torch.dtype],
) -> list[_Wanted]:
    """Return the distinct parameters and buffers of a model."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    if unknown := sorted(special.keys() - {name for each in names.values() for name in each}):
        raise ValueError(
            f"special_dtypes={unknown}: the model has no such parameter or buffer; see named_parameters()"
        )
    saved = model.state_dict(keep_vars=True).keys()
    wanted: list[_Wanted] = []
    for key, tensor in tensors.items():
        own = tuple(names[key])
        if is_packed(tensor):
            raise ValueError(
                f"{own[0]!r} is quantised already: load into the model as it was before, and give quantization=... "
                "for its weights to be packed as they come"
            )
        chosen = next((special[name] for name in own if name in special), None)
        described = Stored(tuple(tensor.shape), dtype_after(tensor, dtype, chosen))
        kept = tuple(name for name in own if name in saved)
        place = _one_place([places[name] for name in own])
        wanted.append(_Wanted(own, kept, tensor, described, chosen is not None, place))
    return wanted


def _arrival(
    wanted: _Wanted,
    stored: Mapping[str, Stored],
    found: Mapping[str, str],
    misfits: Misfits,
    written: Collection[str],
) -> PlannedTensor | None:
    """Return the arrival of a tensor of the model; None if the checkpoint has nothing for it.

    A tensor that a forward writes to cannot be converted at use: if its dtype is not the file's, it goes to memory.
    """
    names, saved, tensor, described, converts, place = wanted
    there = [name for name in saved if name in found]
    if not there:
        empty = tensor.is_meta and not _is_meta(place)
        misfits.absent(names[0], described, persistent=bool(saved), empty=empty)
        return None
    for name in there:
        misfits.compare(name, stored[found[name]], described, converts=converts)
    first, *copies = (found[name] for name in there)
    for copy in copies:
        misfits.compare_copies(there, stored[first], stored[copy])
    if place == "disk" and names[0] in written and stored[first].dtype != described.dtype:
        place = torch.device("cpu")
    box = box_of_dtensor(tensor, name=repr(names[0])) if is_dtensor(tensor) else None
    return PlannedTensor(
        names=names, stored=first, copies=tuple(copies), shape=described.shape if box is None else box.sizes,
        stored_dtype=stored[first].dtype, dtype=described.dtype, place=place, box=box,
    )  # fmt: skip


def _renamed(names: Collection[str], rename: Callable[[str], str | None] | None) -> dict[str, str]:
    """Return the name in the checkpoint of each name to look for in the model."""
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


def _one_place(places: Sequence[Place]) -> Place:
    """Return the place of a tensor with several names: the first device among theirs, or else the first place."""
    for place in places:
        if place != "disk" and place.type != "meta":
            return place
    return places[0]


def _is_meta(place: Place) -> bool:
    return place != "disk" and place.type == "meta"
