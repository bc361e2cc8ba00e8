"""Accelerate's configuration files, read into our sections, so that a move costs nothing.

What has no counterpart here is refused by name, unless the file switches it off anyway.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from drivetrain_config.errors import ConfigError

_MARKS = ("compute_environment", "distributed_type")

# Processes are counted over all nodes, there and here.
_SAME_MEANING = {
    "num_processes": ("launch", "num_processes"),
    "num_machines": ("launch", "num_nodes"),
    "machine_rank": ("launch", "node_rank"),
    "main_process_ip": ("launch", "master_addr"),
    "main_process_port": ("launch", "master_port"),
    "rdzv_backend": ("launch", "rdzv_backend"),
    "gpu_ids": ("launch", "devices"),
    "mixed_precision": ("run", "mixed_precision"),
    "use_cpu": ("run", "cpu"),
    "gradient_accumulation_steps": ("run", "gradient_accumulation_steps"),
    "debug": ("state", "debug"),
}

# NO leaves the choice to the number of processes; the others replicate the model.
_BACKENDS = {
    "NO": None,
    "MULTI_CPU": "ddp",
    "MULTI_GPU": "ddp",
    "MULTI_HPU": "ddp",
    "MULTI_MLU": "ddp",
    "MULTI_NPU": "ddp",
    "MULTI_XPU": "ddp",
}

# They describe a network that the rendezvous does not ask about, or a function that a script calls by itself.
_WITHOUT_EFFECT = ("same_network", "main_training_function")

# Known keys that ask for something when they are not off; listed to tell them from misspelt ones.
_OFF_ONLY = (
    "compute_environment",
    "commands",
    "command_file",
    "deepspeed_config",
    "downcast_bf16",
    "dynamo_backend",
    "dynamo_config",
    "enable_cpu_affinity",
    "fp8_config",
    "fsdp_config",
    "ipex_config",
    "megatron_lm_config",
    "mpirun_config",
    "parallelism_config",
    "tp_config",
    "tpu_cluster",
    "tpu_env",
    "tpu_name",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "tpu_vm",
    "tpu_zone",
)
_OFF = (None, False, "", "no", "NO", "LOCAL_MACHINE", [])

Sections = dict[str, dict[str, Any]]
Lines = dict[tuple[str, ...], int]


def is_accelerate(data: Mapping[str, Any]) -> bool:
    """Whether a file of settings is one of Accelerate's: it says where it runs, and is not split in sections."""
    return any(isinstance(data.get(mark), str) or data.get(mark) is False for mark in _MARKS)


def translate(data: Mapping[str, Any], path: Path, lines: Mapping[str, int]) -> tuple[Sections, Lines]:
    """Read an Accelerate file as our sections.

    Args:
        data: What the file holds.
        path: The file, for messages.
        lines: The lines of its keys.

    Returns:
        The sections with their fields, and the lines the fields came from.

    Raises:
        ConfigError: It asks for what has no counterpart here; the message lists all of it.
    """
    sections: Sections = {}
    placed: Lines = {}
    for key, value in data.items():
        for section, field, meant in _meaning(key, value, data):
            sections.setdefault(section, {})[field] = meant
            if key in lines:
                placed[section, field] = lines[key]
    if refused := [_refusal(key, data[key], path, lines) for key in data if not _is_honoured(key, data[key])]:
        raise ConfigError(
            f"{path} is an Accelerate file, and asks for what has no counterpart here: {'; '.join(refused)}. "
            "Take these lines out, or switch them off"
        )
    return sections, placed


def _meaning(key: str, value: Any, data: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """What one key says in our terms: (section, field, value)."""
    if key == "distributed_type":
        backend = _BACKENDS.get(_type_name(value))
        found = [] if backend is None else [("run", "backend", backend)]
        return [*found, ("run", "cpu", True)] if value == "MULTI_CPU" else found
    if key not in _SAME_MEANING or value is None:
        return []
    if key == "gpu_ids":
        return [] if value == "all" else [(*_SAME_MEANING[key], str(value))]  # "0,1", or a single 0
    if key == "use_cpu" and data.get("distributed_type") == "MULTI_CPU":
        return []  # said by the type
    return [(*_SAME_MEANING[key], value)]


def _is_honoured(key: str, value: Any) -> bool:
    if key == "distributed_type":
        return _type_name(value) in _BACKENDS
    return key in _SAME_MEANING or key in _WITHOUT_EFFECT or (key in _OFF_ONLY and _is_off(value))


def _is_off(value: Any) -> bool:
    """Whether a value asks for nothing: off, empty, or a mapping that is switched off."""
    if not isinstance(value, Mapping):
        return value in _OFF
    # torch.compile's other keys describe what dynamo_backend switches on.
    return (
        _is_off(value["dynamo_backend"]) if "dynamo_backend" in value else all(map(_is_off, value.values()))
    )


def _refusal(key: str, value: Any, path: Path, lines: Mapping[str, int]) -> str:
    where = f"{path.name}:{lines[key]} " if key in lines else ""
    if key == "distributed_type":
        return f"{where}{key}: {value} (here: {', '.join(_BACKENDS)})"
    if key in _OFF_ONLY:
        return f"{where}{key}: {value}"
    near = get_close_matches(key, [*_SAME_MEANING, *_WITHOUT_EFFECT, *_OFF_ONLY], n=1)
    return f"{where}{key}: {value} (an unknown key{f', did you mean {near[0]!r}?' if near else ''})"


def _type_name(value: Any) -> str:
    return "NO" if value is False else str(value)  # YAML 1.1 reads a bare NO as false
