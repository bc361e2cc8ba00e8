"""The choice of a precision: a wish and a device in, a frozen policy out."""

from dataclasses import dataclass

import torch

from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.settings import PrecisionSettings
from drivetrain_precision.support import MODES, supported_modes

_BEST_FIRST = ("bf16", "fp16", "no")
_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is computed in which dtype, and why.

    Attributes:
        mode: The precision that is applied: "no" (fp32), "fp16" or "bf16".
        autocast_dtype: The dtype matrix products run in under autocast; None without autocast.
        scaling: How the loss scale moves, as fp16's narrow exponent demands one; None without one.
        reason: One sentence for the effective plan.
    """

    mode: str
    autocast_dtype: torch.dtype | None
    scaling: PrecisionSettings | None
    reason: str


def choose_policy(mode: str, device: torch.device, settings: PrecisionSettings | None = None) -> Policy:
    """Choose the precision for `device`.

    Args:
        mode: "no" for fp32, "fp16", "bf16", or "auto": bf16 where the hardware computes in it, else fp16, else fp32.
        device: The device that training runs on.
        settings: How fp16's loss scale starts and moves.

    Returns:
        The policy; its `reason` says what was decided and why.

    Raises:
        PrecisionError: The mode is unknown, or the device cannot compute in it; the message lists what it can do.
    """
    support = supported_modes(device)
    if mode == "auto":
        chosen = next(name for name in _BEST_FIRST if support[name].level == "native")
        weaker = [name for name in _BEST_FIRST if support[name].level != "native"]
        passed_over = [f"{name}: {support[name].reason}" for name in weaker]
        reason = "; ".join([f"auto chose {chosen!r}: {support[chosen].reason}", *passed_over])
        return _policy(chosen, settings, reason)
    if mode not in MODES:
        allowed = ", ".join(map(repr, MODES))
        raise PrecisionError(f"mixed_precision={mode!r}: must be one of {allowed} or 'auto'")
    if support[mode].level == "none":
        able = [name for name in MODES if support[name].level != "none"]
        raise PrecisionError(
            f"mixed_precision={mode!r}: {device} cannot compute in it ({support[mode].reason}); "
            f"it can do {', '.join(map(repr, able))}, and 'auto' picks the best of these"
        )
    return _policy(mode, settings, support[mode].reason)


def _policy(mode: str, settings: PrecisionSettings | None, reason: str) -> Policy:
    scaling = (settings or PrecisionSettings()) if mode == "fp16" else None
    return Policy(mode=mode, autocast_dtype=_DTYPES.get(mode), scaling=scaling, reason=reason)
