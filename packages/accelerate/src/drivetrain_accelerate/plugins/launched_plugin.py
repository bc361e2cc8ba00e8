"""The plugin of a run whose launch, and not the program, says that models are sharded."""

from typing import Any

from drivetrain.settings import RunSettings
from drivetrain_accelerate.plugins.environment_words import truth_from
from drivetrain_config import resolve

_VARIABLES = {"fsdp": "ACCELERATE_USE_FSDP", "deepspeed": "ACCELERATE_USE_DEEPSPEED"}


def settings_backend() -> str | None:
    """Return the backend that drivetrain's settings say; None if nobody said one."""
    found = resolve(RunSettings, section="run")
    is_said = found.sources["backend"].kind != "default" and found.value.backend != "auto"
    return found.value.backend if is_said else None


def launched_plugin() -> dict[str, Any]:
    """Return the plugin that the launch says, by the name of an Accelerator's argument; nothing if it says none.

    A backend that drivetrain's settings say comes before Accelerate's variables, which also fill the plugin.
    """
    said = settings_backend()
    backend = said or next((name for name, variable in _VARIABLES.items() if truth_from(variable)), None)
    if backend == "fsdp":
        # torch's FSDP takes seconds to import: only a run that asks for it does.
        from drivetrain_accelerate.plugins.fsdp_plugin import FullyShardedDataParallelPlugin

        return {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    if backend == "deepspeed":
        from drivetrain_accelerate.plugins.deepspeed_plugin import DeepSpeedPlugin

        return {"deepspeed_plugin": DeepSpeedPlugin()}
    return {}
