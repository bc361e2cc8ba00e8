"""Plan a load: the tensor of the checkpoint for each tensor of the model, its device and its dtype. Pure."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from drivetrain_dispatch.loading.checkpoint_tensors import (
    CheckpointTensors,
    TensorSpec,
    WeightLoadOptions,
    fp8_parts,
)
from drivetrain_dispatch.loading.load_target import LoadTarget, load_target
from drivetrain_dispatch.loading.state_dict_diff import StateDictDiff
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.planning.device_map import HOST, Place, Placement, Tier, tier_of
from drivetrain_weights import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """A tensor of the model that gets values."""

    names: tuple[str, ...]
    target: LoadTarget
    stored: str  # the name of the tensor in the checkpoint
    copies: tuple[str, ...]  # further names in the checkpoint for the same tensor; their values must be equal
    reads: tuple[str, ...]  # the names in the checkpoint that are read into memory for it
    maps: tuple[str, ...]  # the names in the checkpoint whose values stay on the disk for it
    shape: tuple[int, ...]
    stored_dtype: torch.dtype
    dtype: torch.dtype
    place: Place
    box: Box | None = None  # the position of this rank's shard in the whole tensor; None if it is not sharded
    quantized_bytes: int | None = None  # the bytes of the packed tensor; None if it is not packed

    @property
    def size_bytes(self) -> int:
        """The bytes that the tensor takes where the plan puts it."""
        if self.quantized_bytes is not None:
            return self.quantized_bytes
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def tier(self) -> Tier:
        """The tier of storage of its place."""
        return tier_of(self.place)

    @property
    def on_disk(self) -> bool:
        """True if the tensor stays in a file."""
        return self.tier is Tier.DISK

    @property
    def in_memory(self) -> bool:
        """True if the tensor takes memory: it has values and does not stay in a file."""
        return self.tier in (Tier.DEVICE, Tier.HOST)

    @property
    def is_quantized(self) -> bool:
        """True if the tensor is packed after it is read, in memory or on the disk."""
        return self.quantized_bytes is not None

    @property
    def converted_at_use(self) -> bool:
        """True if the tensor stays in its file in another dtype than the model's."""
        return self.on_disk and self.dtype != self.stored_dtype and not self.is_quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The plan of a load."""

    tensors: tuple[PlannedTensor, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]  # the checkpoint's names, after renaming, that the model lacks
    # Names of tensors that the map places on the disk but that are in memory, since the model computes
    # them and no file holds them.
    computed: tuple[str, ...] = ()
    # The dtypes of tensors that no file holds in their form on the disk, by their stored names.
    to_write: Mapping[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])

    @property
    def quantized(self) -> list[PlannedTensor]:
        """The tensors that are packed once they are read."""
        return [planned for planned in self.tensors if planned.is_quantized]


def plan_load(
    layout: ModelLayout,
    checkpoint: CheckpointTensors,
    placements: Mapping[str, Placement],
    options: WeightLoadOptions,
) -> LoadPlan:
    """Plan a load, and check all that can be known before any tensor is read. Works on the meta device."""
    stored = checkpoint.weights
    found: dict[str, str] = {}  # the name in the checkpoint of each name to look for in the model
    for name in stored:
        new = name if options.rename is None else options.rename(name)
        if new in found:
            raise ValueError(
                f"rename: {found[new]!r} and {name!r} both become {new!r}: give each its own name"
            )
        if new is not None:
            found[new] = name
    known = layout.state.keys() & layout.tensors.keys()
    diff = StateDictDiff(checkpoint=str(checkpoint.path), strict=options.strict)
    planner = _Planner(layout, placements, checkpoint.specs, known, found, diff)
    planned = list(map(planner.plan, layout.aliases))
    diff.unexpected.update({name: stored[file] for name, file in found.items() if name not in known})
    diff.check(known=known, found=found)
    order = {name: index for index, name in enumerate(stored)}
    tensors = sorted(filter(None, planned), key=lambda each: order[each.stored])
    return LoadPlan(tensors=tuple(tensors), missing=tuple(diff.missing), unexpected=tuple(diff.unexpected))


class _Planner(NamedTuple):
    """The model and the checkpoint of a load, and the checkpoint's tensor for each name of the model."""

    layout: ModelLayout
    placements: Mapping[str, Placement]
    stored: Mapping[str, TensorSpec]
    known: Collection[str]
    found: Mapping[str, str]
    diff: StateDictDiff

    def plan(self, names: tuple[str, ...]) -> PlannedTensor | None:
        """Return the plan for a tensor of the model; None if the checkpoint lacks the tensor."""
        layout, stored, found, diff = self.layout, self.stored, self.found, self.diff
        target = load_target(names[0], layout.tensors[names[0]])
        special = next((name for name in names if name in layout.special_dtypes), None)
        spec = TensorSpec(tuple(target.tensor.shape), layout.dtypes[special or names[0]])
        # A tied tensor goes to the first device among those of its names.
        homes: list[Place] = [self.placements[name].home for name in names]
        place = min(homes, key=lambda each: tier_of(each) not in (Tier.DEVICE, Tier.HOST))
        saved = [name for name in names if name in self.known]
        there = [name for name in saved if name in found]
        if not there:
            empty = target.tensor.is_meta and tier_of(place) is not Tier.META
            diff.absent(names[0], spec, persistent=bool(saved), empty=empty)
            return None
        for name in there:
            diff.compare(name, stored[found[name]], spec, converts=special is not None)
        first, *copies = (found[name] for name in there)
        for copy in copies:
            diff.compare_copies(there, stored[first], stored[copy])
        tier = tier_of(place)
        # A forward writes to it, so that it cannot be converted at use.
        if tier is Tier.DISK and names[0] in layout.running_statistics and stored[first].dtype != spec.dtype:
            place, tier = HOST, Tier.HOST
        box = target.box()
        quantized_bytes = None if tier is Tier.META else layout.special_sizes.get(names[0])
        # What is packed is read in full, wherever it goes, unless the checkpoint holds it packed.
        names_of_parts = fp8_parts(first) if quantized_bytes is not None else (first,)
        is_stored_so = names_of_parts[0] in stored
        parts = names_of_parts if is_stored_so else (first,)
        is_read = tier in (Tier.DEVICE, Tier.HOST) or not is_stored_so
        return PlannedTensor(
            names=names, target=target, stored=first, copies=tuple(copies),
            reads=parts if is_read else (), maps=parts if tier is Tier.DISK and not is_read else (),
            shape=spec.shape if box is None else box.sizes, stored_dtype=stored[first].dtype, dtype=spec.dtype,
            place=place, box=box, quantized_bytes=quantized_bytes,
        )  # fmt: skip
