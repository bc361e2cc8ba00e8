"""The options of a load, which its steps hand on as one value."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist

from drivetrain_dispatch.arguments import check_computed, check_dtype
from drivetrain_dispatch.quantization.protocol import Quantization, StoredFP8

# A function called with the bytes read so far and the total.
Progress: TypeAlias = Callable[[int, int], None]
ReadBy = Literal["each", "rank 0"]
_QUANTIZATION = ("pack", "layer", "size_bytes", "skip_modules")  # the members of a Quantization


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
        _check_quantization(self.quantization)
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


def _check_quantization(quantization: object) -> None:
    absent = [name for name in _QUANTIZATION if not hasattr(quantization, name)]
    packs = not (absent or isinstance(quantization, type))
    if quantization is None or packs or isinstance(quantization, StoredFP8):
        return
    given = quantization.__name__ if isinstance(quantization, type) else repr(quantization)
    hint = f", called: {given}()" if isinstance(quantization, type) and not absent else ""
    raise ValueError(
        f"quantization={given}: give a BitsAndBytes4Bit, a BitsAndBytes8Bit, a StoredFP8 or a TorchAO (wrap "
        f"torchao's configuration in TorchAO(...)), or an object with {', '.join(_QUANTIZATION)}{hint}"
    )
