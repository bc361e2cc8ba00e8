"""Mixed precision that fits the hardware.

`choose_policy` takes a device and a mode ("bf16", "fp16", "auto" or "no") and returns the dtype to compute in and the
reason, or raises an error that lists what the device supports; it never falls back silently. `autocast` applies the
policy, and `LossScaler` keeps fp16 gradients from underflowing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_precision.casting import NoAutocast as NoAutocast
    from drivetrain_precision.casting import autocast as autocast
    from drivetrain_precision.checks.autocast_record import AutocastOperation as AutocastOperation
    from drivetrain_precision.checks.autocast_record import RecordedAutocast as RecordedAutocast
    from drivetrain_precision.checks.autocast_rules import autocast_rules as autocast_rules
    from drivetrain_precision.checks.autocast_rules import fp32_operations as fp32_operations
    from drivetrain_precision.checks.half_precision import HalfOperation as HalfOperation
    from drivetrain_precision.checks.half_precision import HalfOperations as HalfOperations
    from drivetrain_precision.checks.half_precision import find_half_operations as find_half_operations
    from drivetrain_precision.errors import HalfPrecisionWarning as HalfPrecisionWarning
    from drivetrain_precision.errors import PrecisionError as PrecisionError
    from drivetrain_precision.losses.chunked_head import chunked_cross_entropy as chunked_cross_entropy
    from drivetrain_precision.losses.existing_logits import cross_entropy as cross_entropy
    from drivetrain_precision.policy import Policy as Policy
    from drivetrain_precision.policy import choose_policy as choose_policy
    from drivetrain_precision.scaler import LossScaler as LossScaler
    from drivetrain_precision.settings import PrecisionSettings as PrecisionSettings
    from drivetrain_precision.support import Support as Support
    from drivetrain_precision.support import supported_modes as supported_modes

# Public name -> the module that defines it.
_MODULES = {
    "AutocastOperation": "checks.autocast_record",
    "HalfOperation": "checks.half_precision",
    "HalfOperations": "checks.half_precision",
    "HalfPrecisionWarning": "errors",
    "LossScaler": "scaler",
    "NoAutocast": "casting",
    "Policy": "policy",
    "PrecisionError": "errors",
    "PrecisionSettings": "settings",
    "RecordedAutocast": "checks.autocast_record",
    "Support": "support",
    "autocast": "casting",
    "autocast_rules": "checks.autocast_rules",
    "choose_policy": "policy",
    "chunked_cross_entropy": "losses.chunked_head",
    "cross_entropy": "losses.existing_logits",
    "find_half_operations": "checks.half_precision",
    "fp32_operations": "checks.autocast_rules",
    "supported_modes": "support",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"drivetrain_precision.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'drivetrain_precision' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
