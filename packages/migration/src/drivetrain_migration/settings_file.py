"""Translate Accelerate's configuration files into sections, so that users can migrate without rewriting them.

A key without a counterpart is refused by name, unless the file switches it off.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain_config import ConfigError
from drivetrain_config.files.settings_file import Contents
from drivetrain_launcher import detect_host
from drivetrain_messages import suggest
from drivetrain_migration.option_families import DEEPSPEED, FP8_CONFIG, FSDP, MEGATRON
from drivetrain_migration.option_meanings import Family, read_words

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
    **{f"MULTI_{kind}": "ddp" for kind in ("CPU", "GPU", "HPU", "MLU", "NPU", "XPU")},
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "megatron",
}

# Keys that hold options of one kind, with the distributed_type that they require, if any.
_FAMILIES: Mapping[str, tuple[Family, str | None]] = {
    "fp8_config": (FP8_CONFIG, None),
    "fsdp_config": (FSDP, "FSDP"),
    "deepspeed_config": (DEEPSPEED, "DEEPSPEED"),
    "megatron_lm_config": (MEGATRON, "MEGATRON_LM"),
}

# They describe a network property that the rendezvous does not need, or a function that the script itself calls.
_WITHOUT_EFFECT = ("same_network", "main_training_function")

# Known keys that are refused unless they are off; listed to tell them from misspelled keys.
_OFF_ONLY = """
    compute_environment commands command_file downcast_bf16 dynamo_backend dynamo_config ipex_config
    mpirun_config parallelism_config tp_config tpu_cluster tpu_env tpu_name tpu_use_cluster
    tpu_use_sudo tpu_vm tpu_zone
"""
_OFF = (None, False, "", "no", "NO", "LOCAL_MACHINE", [])


@dataclass(frozen=True, slots=True)
class _Translation:
    """The sections translated so far, and the keys without a counterpart, each with its line in the file."""

    file: Contents
    sections: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    lines: dict[tuple[str, ...], int] = field(default_factory=dict[tuple[str, ...], int])
    notices: list[str] = field(default_factory=list[str])
    refused: list[str] = field(default_factory=list[str])

    def place(self, *keys: str) -> str:
        """Return the name of a key with its line number, for messages."""
        name, line = ".".join(keys), self.file.lines.get(keys)
        return name if line is None else f"{self.file.path.name}:{line} {name}"

    def set(self, section: str, name: str, meant: Any, *keys: str) -> None:
        """Set a field to the value of a key; refuse the key if another key has set another value."""
        fields = self.sections.setdefault(section, {})
        if fields.setdefault(name, meant) != meant:
            self.refuse(meant, f"another key has {section}.{name}={fields[name]}", *keys)
        elif keys in self.file.lines:
            self.lines[section, name] = self.file.lines[keys]

    def refuse(self, value: Any, reason: str, *keys: str) -> None:
        """Refuse a key's value."""
        self.refused.append(f"{self.place(*keys)}: {value}" + (f" ({reason})" if reason else ""))


def translate_settings(file: Contents) -> Contents | None:
    """Translate an Accelerate file into sections; return None for any other file.

    Raises:
        ConfigError: The file requests something without a counterpart; the message lists every such key.
    """
    data = file.data
    if not any(isinstance(data.get(mark), str) or data.get(mark) is False for mark in _MARKS):
        return None
    found = _Translation(file)
    for key, value in data.items():
        if key in _FAMILIES and value:
            family, kind = _FAMILIES[key]
            goes_with_type = kind in (None, data.get("distributed_type"))
            if goes_with_type and isinstance(value, Mapping):
                _read_family(found, family, key, value)
            elif goes_with_type or not _is_off(value):
                beside = "" if kind is None else f" beside distributed_type: {kind}"
                found.refuse(value, f"a mapping{beside}", key)
            continue
        settings, refusal = _meaning(key, value, data)
        for section, name, meant in settings:
            found.set(section, name, meant, key)
        if refusal is not None:
            found.refuse(value, refusal, key)
    if data.get("distributed_type") == "MULTI_GPU" and detect_host("auto").accelerator is None:
        found.notices.append(f"{found.place('distributed_type')}: MULTI_GPU, but this host has no GPU")
    if found.refused:
        raise ConfigError(
            f"{file.path} is an Accelerate file, and asks for options that drivetrain lacks: "
            f"{'; '.join(found.refused)}. Take these lines out, or switch them off"
        )
    return Contents(path=file.path, data=found.sections, lines=found.lines, notices=tuple(found.notices))


def _read_family(found: _Translation, family: Family, key: str, given: Mapping[Any, Any]) -> None:
    words: dict[str, Any] = {str(word): value for word, value in given.items()}
    reading = read_words(family, {word: value for word, value in words.items() if word in family.words})
    for (section, name), (word, value) in reading.settings.items():
        found.set(section, name, value, key, word)
    found.notices.extend(
        f"{found.place(key, word)}: {words[word]}: {text}" for word, text in reading.notices.items()
    )
    for word, value in words.items():
        if word not in family.words:
            found.refuse(value, f"an unknown key{suggest(word, family.words)}", key, word)
        elif word in reading.refused:
            found.refuse(value, reading.refused[word], key, word)


def _meaning(key: str, value: Any, data: Mapping[str, Any]) -> tuple[list[tuple[str, str, Any]], str | None]:
    """Return the fields that a key sets, as (section, field, value), and the reason if the key is refused."""
    if key == "distributed_type":
        kind = "NO" if value is False else str(value)  # YAML 1.1 reads a bare NO as false
        if kind not in _BACKENDS:
            return [], f"here: {', '.join(_BACKENDS)}"
        found = [("run", "backend", _BACKENDS[kind])] if _BACKENDS[kind] is not None else []
        return [*found, ("run", "cpu", True)] if kind == "MULTI_CPU" else found, None
    if key in _SAME_MEANING:
        is_set_by_type = key == "use_cpu" and data.get("distributed_type") == "MULTI_CPU"
        if value is None or is_set_by_type or (key == "gpu_ids" and value == "all"):
            return [], None
        meant = str(value) if key == "gpu_ids" else value  # "0,1", or a single 0
        return [(*_SAME_MEANING[key], meant)], None
    if key in _SWITCHES and value is True:
        return [_SWITCHES[key]], None
    known = [*_SAME_MEANING, *_SWITCHES, *_WITHOUT_EFFECT, *_OFF_ONLY.split(), *_FAMILIES]
    if key in _WITHOUT_EFFECT or (key in known and _is_off(value)):
        return [], None
    if key in _OFF_ONLY.split():
        return [], ""
    return [], "true or false" if key in _SWITCHES else f"an unknown key{suggest(key, known)}"


def _is_off(value: Any) -> bool:
    """Return whether a value requests nothing: off, empty, or a mapping that is switched off."""
    if not isinstance(value, Mapping):
        return value in _OFF
    # torch.compile's other keys only configure what dynamo_backend switches on.
    deciding = [value["dynamo_backend"]] if "dynamo_backend" in value else value.values()
    return all(map(_is_off, deciding))
