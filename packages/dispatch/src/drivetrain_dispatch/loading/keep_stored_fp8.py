"""Keep weights as a checkpoint packs them: in fp8, with a scale for each block."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.loading.checkpoint_tensors import TensorSpec, fp8_parts
from drivetrain_dispatch.loading.load_plan import PlannedTensor
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.quantization.block_scaled import BlockScaledTensor
from drivetrain_weights import MappedFile


class KeepStoredFP8:
    """A packer that reads the values and scales of fp8 weights, and makes weights of them.

    Args:
        stored: The tensors of the checkpoint.
        sources: The source of each.

    Attributes:
        files: The files of weights that stay on the disk, by the checkpoint's names.
    """

    def __init__(self, stored: Mapping[str, TensorSpec], sources: Mapping[str, LazyTensor]) -> None:
        self.files: dict[str, MappedFile] = {}
        self._stored = stored
        self._sources = sources

    def allocate(self, planned: PlannedTensor) -> dict[str, Tensor]:
        """Return memory for the values and scales; none for those that stay in their file."""
        return {
            name: torch.empty(self._stored[name].shape, dtype=self._stored[name].dtype, device=planned.place)
            for name in planned.reads
        }

    def pack(self, planned: PlannedTensor, read: Mapping[str, Tensor]) -> nn.Parameter:
        """Return the weight that is made of its values and scales."""
        mapped = {name: self._sources[name].values() for name in planned.maps}
        for name in planned.maps:
            if (file := self._sources[name].mapped_file()) is not None:
                self.files[planned.stored] = file
        values, scales = {**read, **mapped}.values()
        weight = BlockScaledTensor(values, scales, planned.dtype)
        return nn.Parameter(weight, requires_grad=False)

    def layer(self, module: nn.Module, weight: nn.Parameter) -> nn.Module | None:
        """Return None: every module computes with such weights."""
        del module, weight
        return None

    def undo(self) -> None:
        """Delete nothing: the files are the checkpoint's, or those of converted tensors."""


def kept_sizes(layout: ModelLayout, stored: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Return the bytes in fp8 of the model's weights that a load can keep in fp8, by every name.

    Raises:
        ValueError: The checkpoint has no such weights.
    """
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
