"""The plugins of a run: those that follow from a program's other options or from the launch, and what they say."""

from collections.abc import Mapping
from importlib import import_module
from logging import getLogger
from types import MappingProxyType
from typing import Any, cast

from drivetrain.settings import RunSettings
from drivetrain_accelerate.environment_variables import value_from
from drivetrain_accelerate.plugins.kwargs_handlers import TorchDynamoPlugin
from drivetrain_accelerate.plugins.translate_parallelism import check_dimensions
from drivetrain_config import resolve

logger = getLogger(__name__)

# The backends that Accelerate has a plugin for, each with the variable that asks for it.
_VARIABLES: Mapping[str, str] = MappingProxyType(
    {"fsdp": "ACCELERATE_USE_FSDP", "deepspeed": "ACCELERATE_USE_DEEPSPEED"}
)
_CLASSES = {"fsdp": "FullyShardedDataParallelPlugin", "deepspeed": "DeepSpeedPlugin"}


def add_unsaid_plugins(plugins: dict[str, Any], *, num_processes: int, is_main: bool) -> bool:
    """Add the plugins that follow from the others, from the parallel dimensions or from the launch; rank 0 warns.

    Return whether drivetrain's settings say how models are sharded: the plugin is then a view of them for programs.
    """
    plugins["dynamo_plugin"] = plugins["dynamo_plugin"] or TorchDynamoPlugin()
    dimensions = plugins["parallelism_config"]
    if dimensions is not None:
        check_dimensions(dimensions, num_processes=num_processes)
    given = [name for name in _VARIABLES if plugins[f"{name}_plugin"] is not None]
    if given:
        if len(given) > 1:
            asked = " and ".join(f"{name}_plugin=" for name in given)
            raise ValueError(f"{asked}: a run has one backend; pass one")
        for name, variable in _VARIABLES.items():
            if is_main and name not in given and value_from(variable, False):
                logger.warning(
                    "%s=true gives way to %s_plugin= of the program, which comes first: unset the variable, or leave "
                    "the plugin out",
                    variable,
                    given[0],
                )
        return False
    if dimensions is not None and dimensions.dp_shard_size > 1:
        plugins |= _made("fsdp", fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        return False
    plugins |= launched_plugin()
    return settings_backend() in _VARIABLES


def settings_backend() -> str | None:
    """Return the backend that drivetrain's settings say; None if nobody said one."""
    found = resolve(RunSettings, section="run")
    is_said = found.sources["backend"].kind != "default" and found.value.backend != "auto"
    return found.value.backend if is_said else None


def launched_plugin() -> dict[str, Any]:
    """Return the plugin that the launch says, if any, by the name of an Accelerator's argument.

    A backend that drivetrain's settings say comes before Accelerate's variables, which also fill the plugin.
    """
    asked = [name for name, variable in _VARIABLES.items() if value_from(variable, False)]
    backend = settings_backend()
    if backend is None and len(asked) > 1:
        raise ValueError(
            f"{' and '.join(map(_VARIABLES.__getitem__, asked))} are both true, and a run has one backend: unset "
            "one of them, or pass the plugin of the one you mean"
        )
    backend = backend or next(iter(asked), None)
    return _made(backend) if backend is not None and backend in _VARIABLES else {}


def _made(backend: str, **fields: Any) -> dict[str, Any]:
    # torch's FSDP takes seconds to import: only a run that asks for it does.
    module = import_module(f"drivetrain_accelerate.plugins.{backend}_plugin")
    return {f"{backend}_plugin": getattr(module, _CLASSES[backend])(**fields)}


def shown_plugin(plugin: Any) -> str | None:
    """Return what a plugin, or several by name, say: equal for equal options, and unchanged by later use.

    A text, since some options, such as partial functions, are not equal to others of the same parts.
    """
    if plugin is None:
        return None
    if isinstance(plugin, Mapping):
        named = cast("Mapping[str, Any]", plugin)
        return repr({name: shown_plugin(each) for name, each in named.items()})
    said = {
        name: value
        for name, value in vars(plugin).items()
        if not name.startswith("_")
        and name not in ("hf_ds_config", "dschf")  # made of the others, or noted in use
    }
    return f"{type(plugin).__name__}: {said!r}"
