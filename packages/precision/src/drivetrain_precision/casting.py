"""A policy as a context: what runs inside computes in the policy's dtype."""

from contextlib import AbstractContextManager, nullcontext

import torch

from drivetrain_precision.policy import Policy


def autocast(policy: Policy, device: torch.device, *, enabled: bool = True) -> AbstractContextManager[object]:
    """Enter the policy's autocast; without one (fp32), do nothing.

    Args:
        policy: The policy from `choose_policy`.
        device: The device whose operations are cast.
        enabled: False turns an outer autocast off inside, for a loss that must be computed in fp32.

    Returns:
        A context manager. It may be entered again after it was left, though not while it is open.
    """
    if policy.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=policy.autocast_dtype, enabled=enabled)
