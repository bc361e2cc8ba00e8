"""A context manager that makes operations compute in a policy's dtype."""

from contextlib import AbstractContextManager, ContextDecorator
from functools import partial
from typing import Literal, overload

import torch
from torch import nn

from drivetrain_precision.checks.autocast_record import RecordedAutocast
from drivetrain_precision.policy import Policy


class NoAutocast(AbstractContextManager[None], ContextDecorator):
    """A context and a decorator that changes nothing, for policies in fp32."""

    def __exit__(self, *_: object) -> None:
        """Leave the block without any change."""


@overload
def autocast(
    policy: Policy | str,
    device: torch.device | torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    dtype: torch.dtype | None = None,
    record: Literal[False] = False,
    model: None = None,
) -> torch.autocast | NoAutocast: ...


@overload
def autocast(
    policy: Policy | str,
    device: torch.device | torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    dtype: torch.dtype | None = None,
    record: Literal[True],
    model: nn.Module | None = None,
) -> RecordedAutocast: ...


def autocast(
    policy: Policy | str,
    device: torch.device | torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    dtype: torch.dtype | None = None,
    record: bool = False,
    model: nn.Module | None = None,
) -> torch.autocast | NoAutocast | RecordedAutocast:
    """Return the policy's autocast; for a policy in fp32, a context that does nothing.

    A call in the form `autocast(device_type, dtype)` returns torch.autocast. All results are reusable contexts and
    decorators; only a recording context can be entered inside itself, since torch's autocast would then stay on.

    Args:
        policy: The policy from `choose_policy`; or a device type such as "cuda".
        device: The device whose operations are cast; after a device type, the dtype to cast to, or None for torch's
            default.
        enabled: Whether to cast; False disables an outer autocast, for a loss that must be computed in fp32.
        cache_enabled: Whether casts of weights are kept for later uses in the block; None for torch's setting.
        dtype: The dtype to cast to; torch.autocast's name for its second argument.
        record: Whether to record which operations run in fp32 and which in half precision. Recording inspects each
            call and keeps torch.compile from fusing; use it for one step.
        model: The model, which gives modules in the record their names.

    Example:
        >>> from drivetrain_precision import choose_policy
        >>> policy = choose_policy("bf16", torch.device("cpu"))
        >>> with autocast(policy, torch.device("cpu")):
        ...     torch.nn.Linear(4, 2)(torch.ones(1, 4)).dtype
        torch.bfloat16
    """
    if model is not None and not record:
        raise TypeError("model= names the modules of a record: pass record=True too, or leave it out")
    if isinstance(policy, Policy):
        if not isinstance(device, torch.device) or dtype is not None:
            raise TypeError(
                f"autocast(policy, {device!r}, dtype={dtype}): after a policy, pass a torch.device, and no dtype"
            )
        kind, dtype = device.type, policy.autocast_dtype
        is_plain = dtype is None
    else:
        if isinstance(device, torch.device) or (device is not None and dtype is not None):
            raise TypeError(
                f"autocast({policy!r}, {device!r}, dtype={dtype}): after a device type, pass one dtype such as "
                "torch.bfloat16"
            )
        kind, dtype, is_plain = policy, dtype or device, False
    cast = partial(torch.autocast, kind, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
    make = NoAutocast if is_plain else cast
    return RecordedAutocast(make, model) if record else make()
