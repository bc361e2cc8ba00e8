"""Accelerate's configuration file as a dataclass: read, check and write it."""

import json
from dataclasses import dataclass, fields
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, Self, cast

import yaml

from drivetrain_accelerate.errors import NotProvidedError
from drivetrain_accelerate.plugins.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from drivetrain_config import environ
from drivetrain_config.files.file_text import parse_json, read_text
from drivetrain_config.files.yaml_file import check_levels

_cache = Path(environ.read("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
hf_cache_home = str(Path(environ.read("HF_HOME") or _cache).expanduser())
cache_dir = str(Path(hf_cache_home) / "accelerate")
default_yaml_config_file = str(Path(cache_dir) / "default_config.yaml")
default_json_config_file = default_yaml_config_file
default_config_file = default_yaml_config_file

# What a file that leaves them out means.
_UNSAID = {"mixed_precision": None, "use_cpu": False, "debug": False, "enable_cpu_affinity": False}


@dataclass
class BaseConfig:
    """The fields of every configuration file; `mixed_precision` is None if the file does not set it."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        """Turn words into members of the enums; raise a ValueError for an unknown word."""
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        is_hosted = self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
        kind = SageMakerDistributedType if is_hosted else DistributedType
        self.distributed_type = kind(self.distributed_type)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by key, without empty values."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in found.items()
            if value is not None and value != {}
        }

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a file's contents with today's keys; raise a ValueError if `distributed_type` is missing."""
        if "distributed_type" not in config_dict:
            raise ValueError(
                "A `distributed_type` must be specified in the config file. drivetrain's own settings files have "
                "none: `drivetrain launch --config FILE` reads them"
            )
        config = {"compute_environment": ComputeEnvironment.LOCAL_MACHINE.value, **config_dict}
        if config.pop("fp16", False) is True and "mixed_precision" not in config:
            config["mixed_precision"] = "fp16"
        if "dynamo_backend" in config:
            backend = str(config.pop("dynamo_backend"))
            config["dynamo_config"] = {} if backend.upper() == "NO" else {"dynamo_backend": backend}
        if config["distributed_type"] is False:  # YAML 1.1 reads a bare NO so
            config["distributed_type"] = "NO"
        return {**_UNSAID, **config}

    @classmethod
    def from_json_file(cls, json_file: str | PathLike[str] | None = None) -> Self:
        """Return the configuration of a JSON file, by default Accelerate's default file."""
        return cls._read(json_file, is_json=True)

    def to_json_file(self, json_file: str | PathLike[str]) -> None:
        """Write the configuration as JSON."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        Path(json_file).write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def from_yaml_file(cls, yaml_file: str | PathLike[str] | None = None) -> Self:
        """Return the configuration of a YAML file, by default Accelerate's default file."""
        return cls._read(yaml_file, is_json=False)

    def to_yaml_file(self, yaml_file: str | PathLike[str]) -> None:
        """Write the configuration as YAML."""
        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")

    @classmethod
    def _read(cls, file: str | PathLike[str] | None, *, is_json: bool) -> Self:
        path = Path(default_config_file if file is None else file)
        text = read_text(path)
        if is_json:
            contents: object = parse_json(path, text)
        else:
            check_levels(path, text)
            contents = yaml.safe_load(text)
        given = cast("dict[str, Any]", contents) if isinstance(contents, dict) else {}
        if given.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value:
            raise NotProvidedError(
                f"{path} is for SageMaker, for which there is no launcher here: start the script on its machines, by "
                "`drivetrain launch --as-accelerate` there"
            )
        config = cls.process_config(given)
        known = {each.name for each in fields(cls)}
        if unknown := sorted(config.keys() - known - _UNSAID.keys()):
            raise ValueError(
                f"The config file at {path} had unknown keys ({unknown}): take them out, or correct their names"
            )
        if "num_processes" in known and config["distributed_type"] == DistributedType.NO:
            config.setdefault("num_processes", 1)
        return cls(**{name: value for name, value in config.items() if name in known})


@dataclass
class ClusterConfig(BaseConfig):
    """The configuration of runs on the user's machines; each attribute is a flag of `accelerate launch`."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Turn words into members of the enums, and each missing group of options into an empty dict."""
        super().__post_init__()
        for each in fields(self):
            if each.name.endswith("config") and getattr(self, each.name) is None:
                setattr(self, each.name, {})


def load_config_from_file(config_file: str | PathLike[str] | None) -> ClusterConfig:
    """Return the configuration in a YAML or JSON file, by default Accelerate's default file.

    A missing file raises a FileNotFoundError. A file of another program, or with unknown keys or words, raises a
    ValueError, and a file for SageMaker a NotProvidedError.
    """
    path = Path(default_config_file if config_file is None else config_file)
    if config_file is not None and not path.exists():
        raise FileNotFoundError(
            f"The passed configuration file `{path}` does not exist: pass an existing file, or none to use "
            f"{default_config_file}, which `drivetrain accelerate config default` writes"
        )
    is_json = path.suffix == ".json"
    return ClusterConfig.from_json_file(path) if is_json else ClusterConfig.from_yaml_file(path)
