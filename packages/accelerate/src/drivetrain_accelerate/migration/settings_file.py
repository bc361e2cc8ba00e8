"""Translate Accelerate's configuration files into sections, so that users can migrate without rewriting them.

A key without a counterpart is refused by name, unless the file switches it off.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain_accelerate.migration.deepspeed_options import DEEPSPEED
from drivetrain_accelerate.migration.fp8_options import FP8_CONFIG
from drivetrain_accelerate.migration.fsdp_options import FSDP
from drivetrain_accelerate.migration.option_meanings import Family, read_words
from drivetrain_config import ConfigError
from drivetrain_config.files.settings_file import Contents
from drivetrain_messages import suggest

_MARKS = ("compute_environment", "distributed_type")

# Both libraries count processes over all nodes.
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

# Switches that stand for a value of a field.
_SWITCHES = {"enable_cpu_affinity": ("launch", "bind", "auto")}

# With NO, the number of processes decides; the MULTI types replicate the model.
_BACKENDS = {
    "NO": None,
    "MULTI_CPU": "ddp",
    "MULTI_GPU": "ddp",
    "MULTI_HPU": "ddp",
    "MULTI_MLU": "ddp",
    "MULTI_NPU": "ddp",
    "MULTI_XPU": "ddp",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
}

# Keys that hold options of one kind, with the distributed_type that they require, if any.
_FAMILIES: Mapping[str, tuple[Family, str | None]] = {
    "fp8_config": (FP8_CONFIG, None),
    "fsdp_config": (FSDP, "FSDP"),
    "deepspeed_config": (DEEPSPEED, "DEEPSPEED"),
}

# They describe a network property that the rendezvous does not need, or a function that the script itself calls.
_WITHOUT_EFFECT = ("same_network", "main_training_function")

# Known keys that are refused unless they are off; listed to tell them from misspelled keys.
_OFF_ONLY = (
    "compute_environment",
    "commands",
    "command_file",
    "downcast_bf16",
    "dynamo_backend",
    "dynamo_config",
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

Lines = Mapping[tuple[str, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Translation:
    """The contents so far of a translated file, and the keys without a counterpart, each with its place."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    lines: dict[tuple[str, ...], int] = field(default_factory=dict[tuple[str, ...], int])
    notices: list[str] = field(default_factory=list[str])
    refused: list[str] = field(default_factory=list[str])


def translate(file: Contents) -> Contents | None:
    """Translate an Accelerate file into sections; return None for any other file.

    Raises:
        ConfigError: The file requests something without a counterpart; the message lists every such key.
    """
    data, path, lines = file.data, file.path, file.lines
    if not any(isinstance(data.get(mark), str) or data.get(mark) is False for mark in _MARKS):
        return None
    found = _Translation()
    for key, value in data.items():
        if key in _FAMILIES and value and (_goes_with_type(key, data) or not _is_off(value)):
            _read_family(found, key, data, path, lines)
            continue
        for section, name, meant in _meaning(key, value, data):
            _set(found, (section, name), meant, _Place(path, (key,), lines))
        if not _is_honoured(key, value):
            found.refused.append(_refusal(key, value, _Place(path, (key,), lines)))
    if found.refused:
        raise ConfigError(
            f"{path} is an Accelerate file, and asks for what has no counterpart here: "
            f"{'; '.join(found.refused)}. Take these lines out, or switch them off"
        )
    return Contents(path=path, data=found.sections, lines=found.lines, notices=tuple(found.notices))


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a key in a file."""

    path: Path
    keys: tuple[str, ...]
    lines: Lines

    @property
    def line(self) -> int | None:
        return self.lines.get(self.keys)

    def __str__(self) -> str:
        name = ".".join(self.keys)
        return name if self.line is None else f"{self.path.name}:{self.line} {name}"


def _set(found: _Translation, setting: tuple[str, str], meant: Any, place: _Place) -> None:
    section, name = setting
    fields = found.sections.setdefault(section, {})
    if fields.setdefault(name, meant) != meant:
        found.refused.append(f"{place}: {meant} (another key has {section}.{name}={fields[name]})")
    elif place.line is not None:
        found.lines[setting] = place.line


def _goes_with_type(key: str, data: Mapping[str, Any]) -> bool:
    return _FAMILIES[key][1] in (None, data.get("distributed_type"))


def _read_family(found: _Translation, key: str, data: Mapping[str, Any], path: Path, lines: Lines) -> None:
    """Read the options of one kind; refuse those of FSDP and DeepSpeed under a type that applies neither."""
    family, kind = _FAMILIES[key]
    given = data[key]
    if not _goes_with_type(key, data) or not isinstance(given, Mapping):
        beside = "" if kind is None else f" beside distributed_type: {kind}"
        found.refused.append(f"{_Place(path, (key,), lines)}: {given} (a mapping{beside})")
        return
    words: dict[str, Any] = {str(word): value for word, value in given.items()}
    places = {word: _Place(path, (key, word), lines) for word in words}
    reading = read_words(family, {word: value for word, value in words.items() if word in family.words})
    for setting, (word, value) in reading.settings.items():
        _set(found, setting, value, places[word])
    found.notices.extend(f"{places[word]}: {words[word]}: {text}" for word, text in reading.notices.items())
    for word, place in places.items():
        if word not in family.words:
            found.refused.append(f"{place}: {words[word]} ({_unknown(word, family.words)})")
        elif word in reading.refused:
            found.refused.append(f"{place}: {words[word]} ({reading.refused[word]})")


def _meaning(key: str, value: Any, data: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return what one key sets, as (section, field, value)."""
    if key == "distributed_type":
        backend = _BACKENDS.get(_type_name(value))
        found = [] if backend is None else [("run", "backend", backend)]
        return [*found, ("run", "cpu", True)] if value == "MULTI_CPU" else found
    if key in _SWITCHES:
        return [_SWITCHES[key]] if value is True else []
    if key not in _SAME_MEANING or value is None:
        return []
    if key == "gpu_ids":
        return [] if value == "all" else [(*_SAME_MEANING[key], str(value))]  # "0,1", or a single 0
    if key == "use_cpu" and data.get("distributed_type") == "MULTI_CPU":
        return []  # MULTI_CPU sets it
    return [(*_SAME_MEANING[key], value)]


def _is_honoured(key: str, value: Any) -> bool:
    if key == "distributed_type":
        return _type_name(value) in _BACKENDS
    if key in _SAME_MEANING or key in _WITHOUT_EFFECT:
        return True
    if key in _SWITCHES and value is True:
        return True
    return (key in _OFF_ONLY or key in _FAMILIES or key in _SWITCHES) and _is_off(value)


def _is_off(value: Any) -> bool:
    """Return whether a value requests nothing: off, empty, or a mapping that is switched off."""
    if not isinstance(value, Mapping):
        return value in _OFF
    # torch.compile's other keys only configure what dynamo_backend switches on.
    return (
        _is_off(value["dynamo_backend"]) if "dynamo_backend" in value else all(map(_is_off, value.values()))
    )


def _refusal(key: str, value: Any, place: _Place) -> str:
    if key == "distributed_type":
        return f"{place}: {value} (here: {', '.join(_BACKENDS)})"
    if key in _OFF_ONLY:
        return f"{place}: {value}"
    if key in _SWITCHES:
        return f"{place}: {value} (true or false)"
    known = [*_SAME_MEANING, *_SWITCHES, *_WITHOUT_EFFECT, *_OFF_ONLY, *_FAMILIES]
    return f"{place}: {value} ({_unknown(key, known)})"


def _unknown(key: str, known: Iterable[str]) -> str:
    return f"an unknown key{suggest(key, known)}"


def _type_name(value: Any) -> str:
    return "NO" if value is False else str(value)  # YAML 1.1 reads a bare NO as false
