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
_RESHARDING = ("full_shard", "hybrid_shard")


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
    run, state = said.get("run", {}), said.get("state", {})
    found: dict[str, _Told] = {}
    if "mixed_precision" in run:
        found["ACCELERATE_MIXED_PRECISION"] = _Told(str(run["mixed_precision"]), "run.mixed_precision")
    if run.get("cpu") or state.get("device") == "cpu":
        found["ACCELERATE_USE_CPU"] = _Told("true", "run.cpu" if run.get("cpu") else "state.device")
    if "gradient_accumulation_steps" in run:
        steps = _Told(str(run["gradient_accumulation_steps"]), "run.gradient_accumulation_steps")
        found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = steps
    if state.get("debug"):
        found["ACCELERATE_DEBUG_MODE"] = _Told("true", "state.debug")
    backend = str(run.get("backend"))
    if (variables := _OF_BACKEND.get(backend)) is not None:
        found |= variables(said.get(backend, {}))
    return found


def _fsdp_variables(fsdp: Mapping[str, Any]) -> dict[str, _Told]:
    found = {
        "ACCELERATE_USE_FSDP": _Told("true", "run.backend"),
        "FSDP_VERSION": _Told("2", "run.backend"),
        "FSDP_AUTO_WRAP_POLICY": _Told("TRANSFORMER_BASED_WRAP", "run.backend"),
    }

    def tell(variable: str, text: str, field: str) -> None:
        found[variable] = _Told(text, f"fsdp.{field}")

    if strategy := fsdp.get("strategy"):
        tell("FSDP_SHARDING_STRATEGY", str(strategy).upper(), "strategy")
        tell("FSDP_RESHARD_AFTER_FORWARD", str(strategy in _RESHARDING).lower(), "strategy")
    if wrap := fsdp.get("wrap"):
        tell("FSDP_TRANSFORMER_CLS_TO_WRAP", ",".join(wrap), "wrap")
    elif size := fsdp.get("min_num_params"):
        tell("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "min_num_params")
        tell("FSDP_MIN_NUM_PARAMS", str(size), "min_num_params")
    if fsdp.get("offload"):
        tell("FSDP_OFFLOAD_PARAMS", "true", "offload")
    if fsdp.get("activation_checkpointing") == "full":
        tell("FSDP_ACTIVATION_CHECKPOINTING", "true", "activation_checkpointing")
    if fsdp.get("prefetch"):
        tell("FSDP_FORWARD_PREFETCH", "true", "prefetch")
    return found


def _deepspeed_variables(deepspeed: Mapping[str, Any]) -> dict[str, _Told]:
    prefix = "ACCELERATE_DEEPSPEED"
    found = {"ACCELERATE_USE_DEEPSPEED": _Told("true", "run.backend")}
    named = {
        "config": ("CONFIG_FILE",),
        "stage": ("ZERO_STAGE",),
        "offload_optimizer": ("OFFLOAD_OPTIMIZER_DEVICE",),
        "offload_param": ("OFFLOAD_PARAM_DEVICE",),
        "nvme_path": ("OFFLOAD_OPTIMIZER_NVME_PATH", "OFFLOAD_PARAM_NVME_PATH"),
    }
    for field, names in named.items():
        if deepspeed.get(field) is not None:
            found |= {
                f"{prefix}_{name}": _Told(str(deepspeed[field]), f"deepspeed.{field}") for name in names
            }
    return found


# The backends that Accelerate's variables tell of, each with the function that translates its section.
_OF_BACKEND: Mapping[str, Callable[[Mapping[str, Any]], dict[str, _Told]]] = {
    "fsdp": _fsdp_variables,
    "deepspeed": _deepspeed_variables,
}
