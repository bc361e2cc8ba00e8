"""Check arguments that several functions share; each error names the argument and the values it accepts."""

import torch


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
