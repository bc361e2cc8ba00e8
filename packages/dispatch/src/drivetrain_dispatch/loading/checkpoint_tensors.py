"""The options of a load, and the tensors of an open checkpoint in a model's names and form, not read yet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

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
        """Check what a user gave."""
        if self.progress is not None and not callable(self.progress):
            raise ValueError(
                f"progress={self.progress!r} cannot be called: give a function of the bytes read and of all"
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
    """Check the dtype of a load.

    Raises:
        ValueError: The argument is not a `torch.dtype`, or no layer computes in it.
    """
    if dtype is None:
        return
    check_dtype("dtype", dtype)
    if isinstance(dtype, torch.dtype):
        check_computed(
            "dtype", dtype, "load in torch.bfloat16, then apply_layerwise_casting(model, storage_dtype=...)"
        )


class TensorSpec(NamedTuple):
    """The description of a tensor without its values.

    Attributes:
        divisible: Whether the file can be read from any element of the tensor on.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    divisible: bool = True

    @property
    def size_bytes(self) -> int:
        """The bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensors:
    """The tensors of a checkpoint, by its names, or by the model's if it is converted.

    Attributes:
        sources: The tensors, which are read on demand; empty on a rank that has not opened the files.
    """

    path: Path
    specs: Mapping[str, TensorSpec]
    sources: Mapping[str, LazyTensor]

    @property
    def weights(self) -> dict[str, TensorSpec]:
        """The descriptions of the tensors without the parts of fp8 weights."""
        parts = {part for name in self.specs for part in fp8_parts(name)}
        return {name: spec for name, spec in self.specs.items() if name not in parts}

    def check_copies(self, name: str, copies: Sequence[str]) -> None:
        """Check that tensors which are one tensor of the model are equal."""
        for copy in copies:
            if not _same(*(self.sources[each].values() for each in (name, copy))):
                raise TiedParametersError(
                    f"{name!r} and {copy!r} are one tensor in the model but differ in the file: untie them, or leave "
                    "one out (rename gives None for it)"
                )

    def check_unchanged(self) -> None:
        """Check that the files were not written to since they were opened.

        Raises:
            WeightFilesError: A file was written to.
        """
        for file in dict.fromkeys(file for source in self.sources.values() for file in source.files()):
            file.check_unchanged()


def fp8_parts(name: str) -> tuple[str, str]:
    """Return the names by which the values and the scales of an fp8 weight are read, if the load keeps them."""
    return f"{name}/0", f"{name}/1"


def open_checkpoint(layout: ModelLayout, path: Path, options: WeightLoadOptions) -> CheckpointTensors:
    """Open a checkpoint for a model; only the headers of its files are read.

    With `rename`, the tensors keep the checkpoint's names and form. With `StoredFP8`, the values and scales of fp8
    weights that the model can keep are there too, by the names of `fp8_parts`.

    Raises:
        WeightFilesError: The path is no checkpoint, a file is damaged, or the checkpoint cannot be converted.
    """
    held = {name: LazyTensor.in_file(file, name) for name, file in open_weights(path).items()}
    sources = held
    if options.rename is None:
        sources = _converted(layout, held, keeps_fp8=isinstance(options.quantization, StoredFP8))
    specs = {
        name: TensorSpec(tuple(source.shape), source.dtype, source.divisible())
        for name, source in sources.items()
    }
    return CheckpointTensors(path=path, specs=specs, sources=sources)


def _converted(layout: ModelLayout, held: dict[str, LazyTensor], *, keeps_fp8: bool) -> dict[str, LazyTensor]:
    """Return a checkpoint's tensors by the model's names and in its form."""
    fp8 = fp8_weights(held, layout.tensors.keys())
    found = converted_names(layout, dequantised(held, fp8))
    if keeps_fp8:
        every_values, every_scales = (converted_names(layout, part) for part in fp8)
        for name, values in every_values.items():
            scales = every_scales.get(name)
            if scales is not None and can_be_kept(values, scales):
                found.update(zip(fp8_parts(name), (values, scales), strict=True))
    if found.keys() == held.keys() and all(found[name] is tensor for name, tensor in held.items()):
        return held
    return {name: found[name] for name in sorted(found, key=lambda name: found[name].position())}


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two mapped tensors of the same shape and dtype hold the same bytes."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return all(
        torch.equal(*(tensor[start : start + _COMPARED_BYTES] for tensor in flat))
        for start in range(0, len(flat[0]), _COMPARED_BYTES)
    )
