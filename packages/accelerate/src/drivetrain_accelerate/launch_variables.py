"""The variables that programs and libraries for Accelerate read, for the settings of a launch.

Accelerate's launcher tells its ranks by variables, which transformers and others read, too. drivetrain's tells them
by settings; this translates those that were said, in the process that runs the program.
"""

from collections.abc import Callable, Mapping
from typing import Any

from drivetrain_config import Layers, resolve
from drivetrain_config.registry import sections

_SECTIONS = ("run", "state", "fsdp", "deepspeed")
_RESHARDING = ("full_shard", "hybrid_shard")


def launch_variables(layers: Layers) -> dict[str, str]:
    """Return Accelerate's variables for the settings that somebody said.

    Args:
        layers: The settings of the process.
    """
    said = {name: _said(kind, name, layers) for name, kind in sections(only=_SECTIONS).items()}
    run, state = said.get("run", {}), said.get("state", {})
    found: dict[str, str] = {}
    if "mixed_precision" in run:
        found["ACCELERATE_MIXED_PRECISION"] = str(run["mixed_precision"])
    if run.get("cpu") or state.get("device") == "cpu":
        found["ACCELERATE_USE_CPU"] = "true"
    if "gradient_accumulation_steps" in run:
        found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(run["gradient_accumulation_steps"])
    if state.get("debug"):
        found["ACCELERATE_DEBUG_MODE"] = "true"
    backend = str(run.get("backend"))
    if (variables := _OF_BACKEND.get(backend)) is not None:
        found |= variables(said.get(backend, {}))
    return found


def _said(kind: type[Any], name: str, layers: Layers) -> dict[str, Any]:
    """Return the fields of a section that are no defaults."""
    found = resolve(kind, section=name, layers=layers)
    return {
        field: getattr(found.value, field)
        for field, source in found.sources.items()
        if source.kind != "default"
    }


def _fsdp_variables(fsdp: Mapping[str, Any]) -> dict[str, str]:
    found = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    }
    if strategy := fsdp.get("strategy"):
        found["FSDP_SHARDING_STRATEGY"] = str(strategy).upper()
        found["FSDP_RESHARD_AFTER_FORWARD"] = str(strategy in _RESHARDING).lower()
    if wrap := fsdp.get("wrap"):
        found["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(wrap)
    elif size := fsdp.get("min_num_params"):
        found |= {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": str(size)}
    if fsdp.get("offload"):
        found["FSDP_OFFLOAD_PARAMS"] = "true"
    if fsdp.get("activation_checkpointing") == "full":
        found["FSDP_ACTIVATION_CHECKPOINTING"] = "true"
    if fsdp.get("prefetch"):
        found["FSDP_FORWARD_PREFETCH"] = "true"
    return found


def _deepspeed_variables(deepspeed: Mapping[str, Any]) -> dict[str, str]:
    prefix = "ACCELERATE_DEEPSPEED"
    found = {"ACCELERATE_USE_DEEPSPEED": "true"}
    named = {
        "config": ("CONFIG_FILE",),
        "stage": ("ZERO_STAGE",),
        "offload_optimizer": ("OFFLOAD_OPTIMIZER_DEVICE",),
        "offload_param": ("OFFLOAD_PARAM_DEVICE",),
        "nvme_path": ("OFFLOAD_OPTIMIZER_NVME_PATH", "OFFLOAD_PARAM_NVME_PATH"),
    }
    for field, names in named.items():
        if deepspeed.get(field) is not None:
            found |= {f"{prefix}_{name}": str(deepspeed[field]) for name in names}
    return found


# The backends that Accelerate's variables tell of, each with the function that translates its section.
_OF_BACKEND: Mapping[str, Callable[[Mapping[str, Any]], dict[str, str]]] = {
    "fsdp": _fsdp_variables,
    "deepspeed": _deepspeed_variables,
}
