"""Store weights in a smaller dtype than they compute in, and convert each when its layer is used."""

import re
from collections.abc import Collection
from typing import cast

import torch
from torch import nn

from drivetrain_dispatch.arguments import check_computed, check_dtype
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.model.model_layout import NORMS, ModelLayout, listed
from drivetrain_dispatch.offload.dispatch import check_dispatchable, dispatch_model, is_dispatched
from drivetrain_dispatch.planning.device_map import placements_of

# Norms, by their usual names and classes, and embeddings: a small dtype hurts them most and saves least.
_SENSITIVE_NAMES = ("norm", "embed")
_SENSITIVE_CLASSES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Embedding, *NORMS)


def apply_layerwise_casting(
    model: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    *,
    skip_modules_pattern: str | Collection[str] = _SENSITIVE_NAMES,
    skip_modules_classes: Collection[type[nn.Module]] = _SENSITIVE_CLASSES,
) -> nn.Module:
    """Store the weights of a model in one dtype and compute in another, one layer at a time.

    With `torch.float8_e4m3fn` for storage and `torch.bfloat16` for computation, a model takes half the memory; values
    are rounded once, in this call. The model stays on its devices; `remove_hooks` leaves it in the storage dtype. Not
    for training.

    Args:
        model: The model; changed in place.
        storage_dtype: The floating-point dtype that weights are stored in.
        compute_dtype: The dtype that weights are converted to at use; skipped parameters are converted in this call.
        skip_modules_pattern: Regular expressions; a parameter whose name one matches stays in `compute_dtype`.
        skip_modules_classes: Module classes whose own parameters stay in `compute_dtype`.

    Returns:
        The same model.

    Raises:
        OffloadedError: The model is dispatched already: give `dispatch_model` the `dtypes` instead.
        DeviceMapError: A tensor has no data.
        ValueError: A dtype is not floating-point, layers cannot compute in `compute_dtype`, a pattern is not a
            regular expression, a class is not a class, or no parameter is left to store.
    """
    if is_dispatched(model):
        raise OffloadedError(
            "the model is dispatched already: convert its weights before, and give dispatch_model(dtypes=...)"
        )
    for name, dtype in (("storage_dtype", storage_dtype), ("compute_dtype", compute_dtype)):
        check_dtype(name, dtype)
        if not dtype.is_floating_point:
            raise ValueError(f"{name}={dtype}: must be a floating-point dtype such as torch.float8_e4m3fn")
    check_computed("compute_dtype", compute_dtype, "give torch.bfloat16, and this one as storage_dtype")
    _check_skipped(listed(skip_modules_pattern), skip_modules_classes)
    layout = ModelLayout.of(model)
    skipped = {
        name for name, module in layout.modules.items() if isinstance(module, tuple(skip_modules_classes))
    }
    parameters = {
        name: tensor
        for name, tensor in layout.parameters.items()
        if tensor.is_floating_point() and name not in layout.quantized
    }
    whole = {
        id(tensor)
        for name, tensor in parameters.items()
        if name.rpartition(".")[0] in skipped
        or any(re.search(pattern, name) for pattern in listed(skip_modules_pattern))
    }
    stored = [name for name, tensor in parameters.items() if id(tensor) not in whole]
    if not stored:
        raise ValueError("nothing to store: every floating-point parameter is skipped, or there is none")
    devices = {name: tensor.device for name, tensor in layout.tensors.items()}
    check_dispatchable(layout, placements_of(layout, devices))
    for tensor in parameters.values():
        tensor.data = tensor.data.to(compute_dtype if id(tensor) in whole else storage_dtype)
    return dispatch_model(model, devices, dtypes=dict.fromkeys(stored, compute_dtype))


def _check_skipped(patterns: Collection[str], classes: object) -> None:
    """Check the patterns and classes of modules to skip."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"skip_modules_pattern={pattern!r} is no regular expression ({error}): give a part of a parameter's "
                "name, such as 'norm'"
            ) from error
    given = cast("Collection[object]", classes) if isinstance(classes, Collection) else (None,)
    if not all(isinstance(each, type) for each in given):
        raise ValueError(
            f"skip_modules_classes={classes!r}: give classes such as (torch.nn.LayerNorm,); names of modules belong "
            "to skip_modules_pattern"
        )
