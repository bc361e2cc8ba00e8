"""The variables that programs and libraries for Accelerate read, for the settings of a launch.

Accelerate's launcher tells its ranks by variables, which transformers and others read, too. drivetrain's tells them
by settings; this translates those that were said, in the process that runs the program. As with Accelerate's
launcher, what the launch says takes the place of what a variable said before.
"""

from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any

from drivetrain_accelerate.environment_variables import is_same_word
from drivetrain_config import Layers, Source, environ, resolve
from drivetrain_config.plugins.registry import sections

logger = getLogger(__name__)

_SECTIONS = ("run", "state", "fsdp", "deepspeed")


def told_variables(layers: Layers) -> dict[str, str]:
    """Return Accelerate's variables for the settings that somebody said.

    Warn of each variable of the environment that says something else and gives way.
    """
    said: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name, kind in sections(only=_SECTIONS).items():
        found = resolve(kind, section=name, layers=layers)
        for field, source in found.sources.items():
            if source.kind != "default":
                said[f"{name}.{field}"] = getattr(found.value, field)
                sources[f"{name}.{field}"] = source
    texts: dict[str, tuple[str, str]] = {}
    for setting, variable, text_of in (*_OF_ANY_RUN, *_OF_BACKEND.get(str(said.get("run.backend")), ())):
        value = said.get(setting)
        if value is not None and (text := text_of(value)):
            texts[variable] = text, setting
    for variable, (text, setting) in texts.items():
        before = environ.read(variable)
        is_first = environ.read("RANK") in (None, "0")
        if is_first and before is not None and not is_same_word(before, text):
            logger.warning(
                "%s=%s in the environment gives way to %s=%s, which %s says: unset the one, or leave out the other",
                variable, before, setting, text, sources[setting],
            )  # fmt: skip
    return {variable: text for variable, (text, _) in texts.items()}


def _always(text: str) -> Callable[[Any], str]:
    return lambda _: text


def _if_on(value: object) -> str:
    return "true" if value else ""


# Each setting, a variable that tells of it, and the variable's text, which is empty where it is not set. A later line
# of the same variable goes first.
_OF_ANY_RUN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("run.mixed_precision", "ACCELERATE_MIXED_PRECISION", str),
    ("state.device", "ACCELERATE_USE_CPU", lambda device: _if_on(device == "cpu")),
    ("run.cpu", "ACCELERATE_USE_CPU", _if_on),
    ("run.gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str),
    ("state.debug", "ACCELERATE_DEBUG_MODE", _if_on),
)
_OF_BACKEND: Mapping[str, tuple[tuple[str, str, Callable[[Any], str]], ...]] = {
    "fsdp": (
        ("run.backend", "ACCELERATE_USE_FSDP", _always("true")),
        ("run.backend", "FSDP_VERSION", _always("2")),
        ("run.backend", "FSDP_AUTO_WRAP_POLICY", _always("TRANSFORMER_BASED_WRAP")),
        ("fsdp.strategy", "FSDP_SHARDING_STRATEGY", str.upper),
        (
            "fsdp.strategy",
            "FSDP_RESHARD_AFTER_FORWARD",
            lambda strategy: str(strategy in ("full_shard", "hybrid_shard")).lower(),
        ),
        ("fsdp.wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP", ",".join),
        ("fsdp.min_num_params", "FSDP_AUTO_WRAP_POLICY", _always("SIZE_BASED_WRAP")),
        ("fsdp.min_num_params", "FSDP_MIN_NUM_PARAMS", str),
        ("fsdp.offload", "FSDP_OFFLOAD_PARAMS", _if_on),
        (
            "fsdp.activation_checkpointing",
            "FSDP_ACTIVATION_CHECKPOINTING",
            lambda checkpointing: _if_on(checkpointing == "full"),
        ),
        ("fsdp.prefetch", "FSDP_FORWARD_PREFETCH", _if_on),
    ),
    "deepspeed": (
        ("run.backend", "ACCELERATE_USE_DEEPSPEED", _always("true")),
        ("deepspeed.config", "ACCELERATE_DEEPSPEED_CONFIG_FILE", str),
        ("deepspeed.stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", str),
        ("deepspeed.offload_optimizer", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", str),
        ("deepspeed.offload_param", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", str),
        ("deepspeed.nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", str),
        ("deepspeed.nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", str),
    ),
}
