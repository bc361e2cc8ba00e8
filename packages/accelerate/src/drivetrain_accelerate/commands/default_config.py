"""Write or update Accelerate's configuration file."""

import sys
from argparse import Namespace
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from drivetrain_accelerate.commands.cluster_config import (
    ClusterConfig,
    default_config_file,
    default_json_config_file,
    load_config_from_file,
)
from drivetrain_accelerate.commands.command_line import arguments_of, parser_of
from drivetrain_accelerate.plugins.enums import (
    TYPE_BY_DEVICE,
    ComputeEnvironment,
    DistributedType,
    PrecisionType,
)
from drivetrain_launcher import detect_host
from drivetrain_launcher.errors import LaunchError
from drivetrain_messages import argument

description = "Create a default config file for Accelerate with only a few flags set."

_PLACE = "the file of Accelerate's, in $HF_HOME/accelerate or ~/.cache/huggingface/accelerate"


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultConfigArguments:
    """The arguments of `drivetrain accelerate config default`."""

    config_file: Path | None = argument(None, f"File to write; by default {_PLACE}.")
    mixed_precision: Literal["no", "fp16", "bf16"] = argument("no", "Precision of the forward.")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfigArguments:
    """The arguments of `drivetrain accelerate config update`."""

    config_file: Path | None = argument(None, f"File to update; by default {_PLACE}.")


def run(arguments: DefaultConfigArguments) -> int:
    """Write Accelerate's configuration file for this machine, without questions."""
    place = arguments.config_file or Path(default_config_file)
    if written := write_basic_config(arguments.mixed_precision, str(place)):
        sys.stdout.write(f"accelerate configuration saved at {written}\n")
    return 0


def run_update(arguments: UpdateConfigArguments) -> int:
    """Bring a configuration file of Accelerate's up to date."""
    try:
        path = update_config(Namespace(config_file=arguments.config_file))
    except ValueError as error:
        raise LaunchError(f"--config_file: {error}") from error
    sys.stdout.write(f"Successfully updated the configuration file at {path}.\n")
    return 0


def write_basic_config(
    mixed_precision: str = "no", save_location: str = default_json_config_file
) -> Path | Literal[False]:
    """Write a configuration file for all accelerators of this machine, and return its path; False if it exists.

    A ValueError refuses a precision other than no, fp16, bf16 and fp8.
    """
    path = Path(save_location)
    if path.exists():
        sys.stdout.write(
            f"Configuration already exists at {save_location}, will not override. Take it away, or pass a different "
            "`save_location`.\n"
        )
        return False
    word = mixed_precision.lower()
    if word not in PrecisionType:
        raise ValueError(
            f"`mixed_precision` should be one of 'no', 'fp16', 'bf16', or 'fp8'. Received {mixed_precision}"
        )
    host = detect_host("auto")
    count = max(1, host.accelerator_count)
    several = TYPE_BY_DEVICE.get(host.accelerator or "", DistributedType.NO)
    config = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=several if count > 1 else DistributedType.NO,
        mixed_precision=word,
        use_cpu=host.accelerator is None,
        debug=False,
        num_processes=count,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    config.to_json_file(path)
    return path


def update_config(args: Namespace) -> str:
    """Rewrite a configuration file, by default Accelerate's own, with today's keys; a ValueError if it is missing."""
    path = Path(default_config_file if args.config_file is None else args.config_file)
    if not path.is_file():
        raise ValueError(f"The passed config file located at {path} doesn't exist.")
    config = load_config_from_file(path)
    (config.to_json_file if path.suffix == ".json" else config.to_yaml_file)(path)
    return str(path)


def default_command_parser(parser: Any, parents: Any) -> Any:  # the position of a program's argument
    """Add `config default` to the subcommands of a parser."""
    return parser_of("default", DefaultConfigArguments, default_config_command, parser)


def default_config_command(args: Namespace) -> None:
    """Write Accelerate's configuration file for this machine, without questions."""
    place: str | PathLike[str] | None = getattr(args, "save_location", None) or args.config_file
    path = None if place is None else Path(place)
    run(DefaultConfigArguments(config_file=path, mixed_precision=args.mixed_precision))


def update_command_parser(parser: Any, parents: Any) -> Any:
    """Add `config update` to the subcommands of a parser."""
    return parser_of("update", UpdateConfigArguments, update_config_command, parser)


def update_config_command(args: Namespace) -> None:
    """Bring a configuration file of Accelerate's up to date."""
    run_update(arguments_of(UpdateConfigArguments, args))
