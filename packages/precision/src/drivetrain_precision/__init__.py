"""Mixed precision that fits the hardware.

`choose_policy` takes a device and a mode ("bf16", "fp16", "auto" or "no") and returns the dtype to compute in and the
reason, or raises an error that lists what the device supports; it never falls back silently. `autocast` applies the
policy, and `LossScaler` keeps fp16 gradients from underflowing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_precision.casting import autocast as autocast
    from drivetrain_precision.errors import PrecisionError as PrecisionError
    from drivetrain_precision.policy import Policy as Policy
    from drivetrain_precision.policy import choose_policy as choose_policy
    from drivetrain_precision.scaler import LossScaler as LossScaler
    from drivetrain_precision.settings import PrecisionSettings as PrecisionSettings
    from drivetrain_precision.support import Support as Support
    from drivetrain_precision.support import supported_modes as supported_modes

# Public name -> the module that defines it.
_MODULES = {
    "LossScaler": "scaler",
    "Policy": "policy",
    "PrecisionError": "errors",
    "PrecisionSettings": "settings",
    "Support": "support",
    "autocast": "casting",
    "choose_policy": "policy",
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
