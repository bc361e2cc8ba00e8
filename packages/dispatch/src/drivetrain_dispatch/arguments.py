"""Check arguments that several functions share; each error names the argument and the values it accepts."""

from collections.abc import Mapping
from typing import cast

import torch

from drivetrain_dispatch.errors import DeviceMapError


def check_dtype(argument: str, dtype: object) -> None:
    """Check that an argument is a `torch.dtype`."""
    if isinstance(dtype, torch.dtype):
        return
    meant = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
    example = meant if isinstance(meant, torch.dtype) else torch.bfloat16
    raise ValueError(f"{argument}={dtype!r} is no torch.dtype: give {example}")


def check_computed(argument: str, dtype: torch.dtype, instead: str) -> None:
    """Check that layers can compute in a dtype: float8 and float4 are storage formats only."""
    if str(dtype).startswith(("torch.float8", "torch.float4")):
        raise ValueError(
            f"{argument}={dtype}: no layer computes in it, weights are only stored so: {instead}"
        )


def check_map(device_map: object, otherwise: str = "") -> None:
    """Check that a device map is a mapping from names to devices."""
    if isinstance(device_map, Mapping):
        names = [name for name in cast("Mapping[object, object]", device_map) if not isinstance(name, str)]
        if names:
            raise DeviceMapError(
                f"device_map={{{names[0]!r}: ...}}: names are text, as named_modules() gives them: {str(names[0])!r}"
            )
        return
    example = 'give a map from names to devices, such as {"": "cpu"}'
    try:
        is_device = device_map == "disk" or bool(torch.device(cast("str", device_map)))
    except (RuntimeError, TypeError):
        is_device = False
    if is_device:
        shown = device_map if isinstance(device_map, int) else str(device_map)
        example += f'; for the whole model on one device {{"": {shown!r}}}'
    raise DeviceMapError(f"device_map={device_map!r}: {example}{otherwise}")
