"""DeepSpeed's ZeRO as a backend: its configuration is derived from the run, its engine implements the protocol.

Read in this order: `library` imports DeepSpeed; `config` makes an engine's configuration, and `config_checks` checks
it; `checks` and `elementwise` refuse what ZeRO would train wrongly; `backend` starts an engine for each model. The
user calls `model`; `engine_backward` runs backwards, `reduction_checks` refuses gradients that ZeRO would mix, and
`gradients` corrects and clips them; `prepared` steps. `master_weights` copies values that a user wrote in place,
`partitioned_parameter` guards the empty parameters of stage 3, and `state` reads and loads a checkpoint. `inference`
starts an engine without training. `compat` holds the private names of DeepSpeed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_deepspeed.backend import DeepSpeedBackend as DeepSpeedBackend
    from drivetrain_deepspeed.errors import EngineConfigError as EngineConfigError
    from drivetrain_deepspeed.inference import infer_with_deepspeed as infer_with_deepspeed
    from drivetrain_deepspeed.settings import DeepSpeedSettings as DeepSpeedSettings

# Module -> its public names.
_NAMES = {
    "backend": "DeepSpeedBackend",
    "errors": "EngineConfigError",
    "inference": "infer_with_deepspeed",
    "settings": "DeepSpeedSettings",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
