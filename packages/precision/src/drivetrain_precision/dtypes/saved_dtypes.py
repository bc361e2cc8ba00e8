"""The differences between dtypes of saved weights and dtypes of the run that loads them."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from drivetrain_precision.dtypes.dtype_policy import DtypePolicy

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def find_conversions(
    saved: Mapping[str, Any], own: Mapping[str, Any], dtypes: DtypePolicy, *, parameters: Collection[str]
) -> dict[str, str]:
    """Return the conversions of a load by tensor, such as {"weight": "bfloat16 to float32"}.

    Only plain floating-point tensors of the two states are compared, sharded or not; tensors not in `parameters` are
    buffers. ValueError if a load would round a tensor and the run's dtypes do not ask for it.
    """
    changed: dict[str, str] = {}
    for name, value in own.items():
        there, here = (getattr(tensor, "dtype", None) for tensor in (saved.get(name), value))
        if there not in _PLAIN or here not in _PLAIN or there is here:
            continue
        changed[name] = f"{str(there)[6:]} to {str(here)[6:]}"
        setting = "param_dtype" if name in parameters else "buffer_dtype"
        asked = dtypes.param if name in parameters else dtypes.buffer
        if torch.promote_types(there, here) is not here and asked is None:
            raise ValueError(
                f"{name} was saved in {str(there)[6:]}, and this run holds it in {str(here)[6:]}: loading would "
                f"round it. Say precision.{setting} to allow this, or build the model in {str(there)[6:]}"
            )
    return changed
