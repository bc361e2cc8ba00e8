"""The options of a load, and the unread tensors of an open checkpoint in a model's names and shapes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

import torch
import torch.distributed as dist

from drivetrain_dispatch.arguments import check_computed, check_dtype
from drivetrain_dispatch.conversion.fp8_checkpoint import can_be_kept, dequantised, fp8_weights
from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.conversion.transformers_tables import converted_names
from drivetrain_dispatch.errors import TiedParametersError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.quantization.protocol import Quantization, StoredFP8
from drivetrain_weights import open_weights

# A function called with the bytes read so far and the total.
Progress: TypeAlias = Callable[[int, int], None]
ReadBy = Literal["each", "rank 0"]
_QUANTIZATION = ("pack", "layer", "size_bytes", "skip_modules")  # the members of a Quantization
_COMPARED_BYTES = 8 * 2**20  # at once


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoadOptions:
    """The options of a load, as `load_checkpoint_in_model` describes them."""

    strict: bool = True
    rename: Callable[[str], str | None] | None = None
    num_threads: int | None = None
    progress: Progress | None = None
    read_by: ReadBy = "each"
    process_group: dist.ProcessGroup | None = None
    quantization: Quantization | StoredFP8 | None = None
    offload_folder: Path | str | None = None

    def __post_init__(self) -> None:
        if self.progress is not None and not callable(self.progress):
            raise ValueError(
                f"progress={self.progress!r} cannot be called: give a function of the bytes read and of the total"
            )
        quantization: object = self.quantization
        absent = [name for name in _QUANTIZATION if not hasattr(quantization, name)]
        packs = not (absent or isinstance(quantization, type))
        if not (quantization is None or packs or isinstance(quantization, StoredFP8)):
            given = quantization.__name__ if isinstance(quantization, type) else repr(quantization)
            hint = f", called: {given}()" if isinstance(quantization, type) and not absent else ""
            raise ValueError(
                f"quantization={given}: give a BitsAndBytes4Bit, a BitsAndBytes8Bit, a StoredFP8 or a TorchAO (wrap "
                f"torchao's configuration in TorchAO(...)), or an object with {', '.join(_QUANTIZATION)}{hint}"
            )
        if self.read_by not in get_args(ReadBy):
            raise ValueError(
                f"read_by={self.read_by!r}: must be one of {', '.join(map(repr, get_args(ReadBy)))}"
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"num_threads={self.num_threads}: must be at least 1")


def check_load_dtype(dtype: object) -> None:
    """Check that a load's dtype is a `torch.dtype` in which layers compute."""
    if dtype is not None:
        check_dtype("dtype", dtype)
        instead = "load in torch.bfloat16, then apply_layerwise_casting(model, storage_dtype=...)"
        check_computed("dtype", cast("torch.dtype", dtype), instead)


class TensorSpec(NamedTuple):
    """The description of a tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    divisible: bool = True  # whether the file can be read from any element of the tensor on

    @property
    def size_bytes(self) -> int:
        """The bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensors:
    """The tensors of a checkpoint, by the checkpoint's names, or after a conversion by the model's names."""

    path: Path
    specs: Mapping[str, TensorSpec]
    # The tensors, which are read on demand; empty on a rank that has not opened the files.
    sources: Mapping[str, LazyTensor]

    @property
    def weights(self) -> dict[str, TensorSpec]:
        """The descriptions of the tensors without the parts of fp8 weights."""
        parts = {part for name in self.specs for part in fp8_parts(name)}
        return {name: spec for name, spec in self.specs.items() if name not in parts}

    def check_copies(self, name: str, copies: Sequence[str]) -> None:
        """Check that the tensors that become one tensor of the model are equal."""
        for copy in copies:
            # The bytes of both, in pieces: they are pages of files.
            one, other = (self.sources[each].values().reshape(-1).view(torch.uint8) for each in (name, copy))
            if not all(map(torch.equal, one.split(_COMPARED_BYTES), other.split(_COMPARED_BYTES))):
                raise TiedParametersError(
                    f"{name!r} and {copy!r} are one tensor in the model but differ in the file: untie them, or leave "
                    "one out (rename gives None for it)"
                )

    def check_unchanged(self) -> None:
        """Check that the files were not written to since they were opened."""
        for file in dict.fromkeys(file for source in self.sources.values() for file in source.files()):
            file.check_unchanged()


def fp8_parts(name: str) -> tuple[str, str]:
    """Return the names by which a load that keeps an fp8 weight reads its values and its scales."""
    return f"{name}/0", f"{name}/1"


def open_checkpoint(layout: ModelLayout, path: Path, options: WeightLoadOptions) -> CheckpointTensors:
    """Open a checkpoint for a model; only the headers of its files are read.

    With `rename`, the tensors keep the checkpoint's names and shapes. With `StoredFP8`, the result also contains the
    values and scales of fp8 weights that the model can keep, by the names of `fp8_parts`.
    """
    sources = {name: LazyTensor.in_file(file, name) for name, file in open_weights(path).items()}
    if options.rename is None:
        fp8 = fp8_weights(sources, layout.tensors.keys())
        found = converted_names(layout, dequantised(sources, fp8))
        if isinstance(options.quantization, StoredFP8):
            every_values, every_scales = (converted_names(layout, part) for part in fp8)
            for name, values in every_values.items():
                scales = every_scales.get(name)
                if scales is not None and can_be_kept(values, scales):
                    found.update(zip(fp8_parts(name), (values, scales), strict=True))
        # Tensors that are converted lie in another order than their new names.
        if found.keys() != sources.keys() or any(found[name] is not each for name, each in sources.items()):
            sources = dict(sorted(found.items(), key=lambda item: item[1].position()))
    specs = {
        name: TensorSpec(tuple(source.shape), source.dtype, source.divisible())
        for name, source in sources.items()
    }
    return CheckpointTensors(path=path, specs=specs, sources=sources)
