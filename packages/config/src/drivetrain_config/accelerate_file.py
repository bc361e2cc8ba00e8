"""Accelerate's YAML files, read into our sections, so that a move costs nothing.

What has no counterpart here is refused by name, unless it is switched off in the file anyway.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain_config.errors import ConfigError

_MARKS = ("compute_environment", "distributed_type")
_RENAMED = {
    "num_machines": ("launch", "num_nodes"),
    "machine_rank": ("launch", "node_rank"),
    "main_process_ip": ("launch", "master_addr"),
    "main_process_port": ("launch", "master_port"),
    "num_processes": ("launch", "num_processes"),
    "rdzv_backend": ("launch", "rdzv_backend"),
    "mixed_precision": ("run", "mixed_precision"),
    "use_cpu": ("run", "cpu"),
    "gradient_accumulation_steps": ("run", "gradient_accumulation_steps"),
    "debug": ("state", "debug"),
}
_BACKENDS = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "MULTI_XPU": "ddp", "MULTI_NPU": "ddp"}
_NO_MEANING = {
    "compute_environment",
    "same_network",
    "main_training_function",
    "tpu_env",
    "tpu_use_cluster",
    "tpu_use_sudo",
}


def is_accelerate(data: Mapping[Any, Any]) -> bool:
    """Whether a file of settings is one of Accelerate's."""
    return any(mark in data for mark in _MARKS)


def translate(
    data: Mapping[Any, Any], path: Path, lines: Mapping[str, int]
) -> list[tuple[str, str, Any, int | None]]:
    """Read an Accelerate file as rows of (section, field, value, line).

    Raises:
        ConfigError: It asks for what drivetrain has no counterpart of; the message lists all of it.
    """
    rows: list[tuple[str, str, Any, int | None]] = []
    refused: list[str] = []
    for key, value in data.items():
        line = lines.get(key)
        if key == "distributed_type":
            if value not in _BACKENDS:
                refused.append(
                    f"{key}: {value} (backends here: {', '.join(sorted(set(_BACKENDS.values())))})"
                )
            else:
                rows.append(("run", "backend", _BACKENDS[value], line))
        elif key == "gpu_ids":
            if value not in (None, "all"):
                rows.append(("launch", "devices", str(value), line))
        elif key in _RENAMED:
            if value is not None:
                section, field = _RENAMED[key]
                rows.append((section, field, value, line))
        elif key not in _NO_MEANING and value not in (None, False, "no", "NO", {}, []):
            refused.append(f"{key}: {value}")
    if refused:
        raise ConfigError(
            f"{path}: is an Accelerate file with settings that have no counterpart here: {'; '.join(refused)}; "
            "remove them, or set them to null"
        )
    return rows
