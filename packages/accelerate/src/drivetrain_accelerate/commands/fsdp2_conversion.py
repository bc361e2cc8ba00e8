"""Convert Accelerate's file from FSDP1's keys to FSDP2's."""

import sys
from argparse import Namespace
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from drivetrain_accelerate.commands.command_line import parser_of
from drivetrain_accelerate.plugins.constants import FSDP_SHARDING_STRATEGY
from drivetrain_launcher.errors import LaunchError
from drivetrain_messages import argument


class ConversionStatus(Enum):
    """The reason why a key of FSDP1 has no key in FSDP2."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


_REMOVED, _LATER = ConversionStatus.REMOVED, ConversionStatus.NOT_YET_IMPLEMENTED
_KEYS = """
    fsdp_version fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_forward_prefetch
    fsdp_cpu_ram_efficient_loading fsdp_offload_params fsdp_sharding_strategy fsdp_state_dict_type
    fsdp_sync_module_states fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_use_orig_params
    fsdp_activation_checkpointing
"""
_CHANGED = {"fsdp_sharding_strategy": "fsdp_reshard_after_forward", "fsdp_forward_prefetch": _LATER}
_GONE = dict.fromkeys(("fsdp_backward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params"), _REMOVED)
# FSDP1's key -> FSDP2's, or why there is none.
ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    name: {**_CHANGED, **_GONE}.get(name, name) for name in _KEYS.split()
}
# Whether parameters are let go between the forward and the backward.
_RESHARDS = {word: word in ("FULL_SHARD", "HYBRID_SHARD") for word in FSDP_SHARDING_STRATEGY}
ARGUMENT_VALUE_MAPPING: dict[str, dict[str, bool]] = {
    name: dict(_RESHARDS) for name in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionArguments:
    """The arguments of `drivetrain accelerate to-fsdp2`."""

    config_file: Path = argument(..., "Configuration file to convert.")
    overwrite: bool = argument(False, "Replace the written file, if it is there.")
    output_file: Path | None = argument(
        None, "File to write; by default, with --overwrite, the one that is converted."
    )


def run(arguments: ConversionArguments) -> int:
    """Convert a configuration file of Accelerate's from FSDP1's keys to FSDP2's."""
    try:
        to_fsdp2_command(arguments)
    except (ValueError, OSError) as error:
        raise LaunchError(str(error)) from error
    return 0


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration file's contents with FSDP2's keys; contents that have these keys stay as they are."""
    given: dict[str, Any] = config.get("fsdp_config") or {}
    if not given:
        return config
    if str(given.get("fsdp_version", 1)) == "2":
        sys.stdout.write(
            "Config already specifies FSDP2, skipping conversion...\nIf its keys are FSDP1's still, change "
            "`fsdp_version` to `1` and run this again.\n"
        )
        return config
    converted: dict[str, Any] = {}
    for key, value in given.items():
        successor = ARGUMENT_KEY_MAPPING.get(key, key)
        if isinstance(successor, ConversionStatus):
            why = "has been removed" if successor is ConversionStatus.REMOVED else "is not yet implemented"
            sys.stdout.write(f"Argument {key} {why} in FSDP2, skipping this key...\n")
            continue
        words = ARGUMENT_VALUE_MAPPING.get(key, {})
        converted[successor] = words.get(value, value) if isinstance(value, str) else value
    return {**config, "fsdp_config": {**converted, "fsdp_version": 2}}


def load_config(config_file: str) -> dict[str, Any]:
    """Return the contents of a configuration file."""
    contents: object = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    return cast("dict[str, Any]", contents) if isinstance(contents, dict) else {}


def to_fsdp2_command(args: Namespace | ConversionArguments) -> None:
    """Convert a configuration file of Accelerate's from FSDP1's keys to FSDP2's.

    A ValueError asks for the output file. An OSError says that the input is missing, or that the output exists.
    """
    source, target = Path(args.config_file), args.output_file
    if not source.exists():
        raise FileNotFoundError(f"Config file {source} not found")
    if target is None and not args.overwrite:
        raise ValueError("If --overwrite is not set, --output_file must be provided")
    target = source if target is None else Path(target)
    if target.exists() and not args.overwrite:
        raise FileExistsError(f"Output file {target} already exists and --overwrite is not set")
    converted = convert_config_to_fsdp2(load_config(str(source)))
    target.write_text(yaml.safe_dump(converted), encoding="utf-8")


to_fsdp2_command_parser = partial(parser_of, "to-fsdp2", ConversionArguments, to_fsdp2_command)
