"""The variables that programs and libraries for Accelerate read, for the settings of a launch.

Accelerate's launcher tells its ranks by variables, which transformers and others read, too. drivetrain's tells them
by settings; this translates those that were said, in the process that runs the program. As with Accelerate's
launcher, what the launch says takes the place of what a variable said before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from drivetrain_accelerate.environment_variables import is_same_word
from drivetrain_config import Layers, Source, environ, resolve
from drivetrain_config.plugins.registry import sections

logger = getLogger(__name__)

_SECTIONS = ("run", "state", "fsdp", "deepspeed")


@dataclass(frozen=True, slots=True)
class _Told:
    """The text of a variable, and the setting that says it, as "section.field"."""

    text: str
    setting: str


def launch_variables(layers: Layers) -> dict[str, str]:
    """Return Accelerate's variables for the settings that somebody said."""
    return {name: told.text for name, told in _translated(_said(layers)[0]).items()}


def told_variables(layers: Layers) -> dict[str, str]:
    """Return the same, and warn of each variable of the environment that says something else and gives way."""
    said, sources = _said(layers)
    found = _translated(said)
    for name, told in found.items():
        before = environ.read(name)
        is_first = environ.read("RANK") in (None, "0")
        if is_first and before is not None and not is_same_word(before, told.text):
            logger.warning(
                "%s=%s in the environment gives way to %s=%s, which %s says: unset the one, or leave out the other",
                name,
                before,
                told.setting,
                told.text,
                sources[told.setting],
            )
    return {name: told.text for name, told in found.items()}


def _said(layers: Layers) -> tuple[dict[str, dict[str, Any]], dict[str, Source]]:
    """Return the fields that are no defaults, by section, and the source of each "section.field"."""
    said: dict[str, dict[str, Any]] = {}
    sources: dict[str, Source] = {}
    for name, kind in sections(only=_SECTIONS).items():
        found = resolve(kind, section=name, layers=layers)
        given = {field: source for field, source in found.sources.items() if source.kind != "default"}
        said[name] = {field: getattr(found.value, field) for field in given}
        sources |= {f"{name}.{field}": source for field, source in given.items()}
    return said, sources


def _translated(said: Mapping[str, Mapping[str, Any]]) -> dict[str, _Told]:
    found: dict[str, _Told] = {}
    backend = str(said.get("run", {}).get("backend"))
    for setting, variable, text_of in (*_OF_ANY_RUN, *_OF_BACKEND.get(backend, ())):
        section, _, field = setting.partition(".")
        value = said.get(section, {}).get(field)
        if value is not None and (text := text_of(value)):
            found[variable] = _Told(text, setting)
    return found


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
