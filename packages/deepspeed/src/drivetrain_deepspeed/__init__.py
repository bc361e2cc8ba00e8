"""DeepSpeed's ZeRO as a backend: its configuration is derived from the run, its engine implements the protocol.

Read in this order: `library` imports DeepSpeed; `config` makes an engine's configuration, and `config_checks` checks
it; `checks` and `elementwise` refuse what ZeRO would train wrongly; `backend` starts an engine for each model. The
user calls `model`; `engine_backward` runs backwards, `reduction_checks` refuses gradients that ZeRO would mix, and
`gradients` corrects and clips them; `prepared` steps. `master_weights` copies values that a user wrote in place,
`partitioned_parameter` guards the empty parameters of stage 3, and `state` reads and loads a checkpoint. `compat`
holds the private names of DeepSpeed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_deepspeed.backend import DeepSpeedBackend as DeepSpeedBackend
    from drivetrain_deepspeed.errors import EngineConfigError as EngineConfigError
    from drivetrain_deepspeed.settings import DeepSpeedSettings as DeepSpeedSettings

# Module -> its public names.
_NAMES = {
    "backend": "DeepSpeedBackend",
    "errors": "EngineConfigError",
    "settings": "DeepSpeedSettings",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"drivetrain_deepspeed.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'drivetrain_deepspeed' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
