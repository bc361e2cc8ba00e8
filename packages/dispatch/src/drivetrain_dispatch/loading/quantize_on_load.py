"""Quantize weights while a checkpoint is read, one at a time, or keep them in fp8 as it stores them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.loading.checkpoint_tensors import TensorSpec, fp8_parts
from drivetrain_dispatch.loading.load_plan import PlannedTensor
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.quantized_tensor import parts_in_file, parts_of, put_parts
from drivetrain_dispatch.offload.relocate import write_offloaded
from drivetrain_dispatch.planning.device_map import Placement
from drivetrain_dispatch.quantization.block_scaled import BlockScaledTensor
from drivetrain_dispatch.quantization.protocol import Quantization, StoredFP8, packed_sizes
from drivetrain_weights import MappedFile


class QuantizeOnLoad:
    """A packer that quantises full weights one by one, on their computing device."""

    def __init__(
        self, quantization: Quantization, placements: Mapping[str, Placement], folder: Path | str | None
    ) -> None:
        # The files of packed weights that stay on the disk, by the checkpoint's names.
        self.files: dict[str, MappedFile] = {}
        self._quantization = quantization
        self._placements = placements
        self._folder = folder

    def allocate(self, planned: PlannedTensor) -> dict[str, Tensor]:
        """Return memory for the whole weight."""
        device = self._placements[planned.names[0]].device
        return {planned.stored: torch.empty(planned.shape, dtype=planned.dtype, device=device)}

    def pack(self, planned: PlannedTensor, read: Mapping[str, Tensor]) -> nn.Parameter:
        """Return the packed weight on the device where it is stored."""
        full = read[planned.stored]
        weight = self._quantization.pack(full)
        if planned.on_disk:
            assert self._folder is not None  # or with_files would have raised
            parts = parts_in_file(planned.names[0], weight)
            file = self.files[planned.stored] = write_offloaded(parts, self._folder)
            put_parts(weight, [file.tensor(key) for key in parts])
        elif planned.place != full.device:
            put_parts(weight, [part.to(planned.place) for part in parts_of(weight)])
        return weight

    def layer(self, module: nn.Module, weight: nn.Parameter) -> nn.Module | None:
        """Return the quantisation library's layer for a packed weight; None to keep the module."""
        assert isinstance(module, nn.Linear)
        return self._quantization.layer(module, weight)

    def undo(self) -> None:
        """Delete the files that were written."""
        for file in self.files.values():
            file.path.unlink(missing_ok=True)


def with_quantized_sizes(
    layout: ModelLayout, stored: Mapping[str, TensorSpec], quantization: Quantization | StoredFP8 | None
) -> ModelLayout:
    """Return a layout with the sizes of the weights that a load packs or keeps packed."""
    if quantization is None:
        return layout
    keeps = isinstance(quantization, StoredFP8)
    sizes = _find_stored_sizes(layout, stored) if keeps else packed_sizes(layout, quantization)
    return replace(layout, special_sizes=sizes)


class KeepStoredFP8:
    """A packer that makes fp8 weights from the values and scales that it reads."""

    def __init__(self, stored: Mapping[str, TensorSpec], sources: Mapping[str, LazyTensor]) -> None:
        # The files of weights that stay on the disk, by the checkpoint's names.
        self.files: dict[str, MappedFile] = {}
        self._stored = stored
        self._sources = sources

    def allocate(self, planned: PlannedTensor) -> dict[str, Tensor]:
        """Return memory for the values and scales; no memory for a weight that stays in its file."""
        return {
            name: torch.empty(self._stored[name].shape, dtype=self._stored[name].dtype, device=planned.place)
            for name in planned.reads
        }

    def pack(self, planned: PlannedTensor, read: Mapping[str, Tensor]) -> nn.Parameter:
        """Return the fp8 weight made of the values and scales that were read."""
        mapped = {name: self._sources[name].values() for name in planned.maps}
        for name in planned.maps:
            if (file := self._sources[name].mapped_file()) is not None:
                self.files[planned.stored] = file
        values, scales = {**read, **mapped}.values()
        weight = BlockScaledTensor(values, scales, planned.dtype)
        return nn.Parameter(weight, requires_grad=False)

    def layer(self, module: nn.Module, weight: nn.Parameter) -> nn.Module | None:
        """Return None: no layer is replaced, as every module computes with fp8 weights."""
        del module, weight
        return None

    def undo(self) -> None:
        """Delete nothing: the files belong to the checkpoint, or hold converted tensors."""


def _find_stored_sizes(layout: ModelLayout, stored: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Return the bytes of each weight that a load can keep in fp8; a tied weight has an entry per name."""
    sizes: dict[str, int] = {}
    for names in layout.aliases:
        there = [fp8_parts(name) for name in names if name in stored]
        if there and all(values in stored for values, _ in there):
            sizes.update(dict.fromkeys(names, sum(stored[part].size_bytes for part in there[0])))
    if not sizes:
        raise ValueError(
            "quantization=StoredFP8() keeps fp8 weights with block scales, and the checkpoint has none that the "
            "model can compute with: leave it out"
        )
    return sizes
