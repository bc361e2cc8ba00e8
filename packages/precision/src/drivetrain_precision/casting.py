"""A context manager that makes operations compute in a policy's dtype."""

from contextlib import AbstractContextManager, nullcontext

import torch

from drivetrain_precision.policy import Policy


def autocast(policy: Policy, device: torch.device, *, enabled: bool = True) -> AbstractContextManager[object]:
    """Return the policy's autocast context; in fp32, return a context that does nothing.

    Args:
        policy: The policy from `choose_policy`.
        device: The device whose operations are cast.
        enabled: Whether to cast; False disables an outer autocast, for a loss that must be computed in fp32.

    Returns:
        A context manager that is reusable, but not reentrant.
    """
    if policy.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=policy.autocast_dtype, enabled=enabled)
