"""The dtypes of a checkpoint's weights against those of the run that loads them."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from drivetrain_backends import Prepared, strip_wrapper_prefix
from drivetrain_precision import DtypePolicy

logger = logging.getLogger(__name__)


def check_dtypes(
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
    prepared: Prepared,
    dtypes: DtypePolicy,
    *,
    is_main: bool,
) -> None:
    """Log the conversions of dtypes in a load, and refuse those that round without a setting for it.

    Args:
        saved: The model's state as it was saved.
        own: The model's state in this run.
        prepared: The model that it is loaded into.
        dtypes: The dtypes of the run: `param` asks for parameters to be rounded, `buffer` for buffers.
        is_main: Whether this rank logs.

    Raises:
        ValueError: A tensor would be rounded; nothing was loaded.
    """
    parameters = {
        strip_wrapper_prefix(name) for name, _ in prepared.unwrap().named_parameters(remove_duplicate=False)
    }
    changed: dict[str, str] = {}
    for name, value in own.items():
        there, here = _dtype(saved.get(name)), _dtype(value)
        if there is None or here is None or there is here:
            continue
        changed[name] = f"{str(there)[6:]} to {str(here)[6:]}"
        setting = "param_dtype" if name in parameters else "buffer_dtype"
        asked = dtypes.param if name in parameters else dtypes.buffer
        if torch.promote_types(there, here) is not here and asked is None:
            raise ValueError(
                f"{name} was saved in {str(there)[6:]}, and this run holds it in {str(here)[6:]}: loading would "
                f"round it. Say precision.{setting} if that is meant, or build the model in {str(there)[6:]}"
            )
    if changed and is_main:
        first = next(iter(changed))
        logger.warning(
            "%d tensors of %s are converted from the checkpoint's dtypes to this run's, such as %s from %s",
            len(changed),
            type(prepared.unwrap()).__name__,
            first,
            changed[first],
        )


def _dtype(value: Any) -> torch.dtype | None:
    """Return the dtype of a plain floating-point tensor, sharded or not; None for anything else."""
    dtype = getattr(value, "dtype", None)
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return dtype if dtype in plain else None
