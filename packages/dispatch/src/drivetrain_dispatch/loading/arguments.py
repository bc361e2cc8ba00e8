"""Check the arguments that every load takes."""

import torch

from drivetrain_dispatch.arguments import check_computed, check_dtype
from drivetrain_dispatch.quantization.protocol import StoredFP8

_QUANTIZATION = ("pack", "layer", "size_bytes", "skip_modules")  # the members of a Quantization


def check_load(dtype: object, quantization: object, progress: object) -> None:
    """Check the arguments that every load takes.

    Raises:
        ValueError: An argument has the wrong type, or no layer computes in the dtype.
    """
    if dtype is not None:
        check_dtype("dtype", dtype)
    if isinstance(dtype, torch.dtype):
        check_computed(
            "dtype", dtype, "load in torch.bfloat16, then apply_layerwise_casting(model, storage_dtype=...)"
        )
    if progress is not None and not callable(progress):
        raise ValueError(
            f"progress={progress!r} cannot be called: give a function of the bytes read and of all"
        )
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
