"""Print what Accelerate and drivetrain report of a machine."""

import platform
import sys
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import psutil
import torch

from drivetrain_accelerate.commands.cluster_config import default_config_file, load_config_from_file
from drivetrain_accelerate.commands.command_line import parser_of, program_of
from drivetrain_accelerate.interface.module_table import PROVIDED_VERSIONS
from drivetrain_config import Layers
from drivetrain_launcher.cli.commands.env import EnvArguments
from drivetrain_launcher.cli.commands.env import run as show_drivetrain
from drivetrain_messages import argument


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportArguments:
    """The arguments of `drivetrain accelerate env`."""

    config_file: Path | None = argument(None, "Accelerate's file; by default its own.")


def run(arguments: ReportArguments) -> int:
    """Print Accelerate's report of this environment, and every setting of drivetrain with its source."""
    env_command(Namespace(config_file=arguments.config_file))
    sys.stdout.write("\n")
    named = arguments.config_file
    return show_drivetrain(EnvArguments(layers=Layers.read(file=named)))


def env_command(args: Namespace) -> dict[str, Any]:
    """Print the versions, the devices and the configuration file, and return them by title."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    provider = f"drivetrain-accelerate {version('drivetrain-accelerate')}"
    found = {
        "`Accelerate` version": f"{PROVIDED_VERSIONS[-1]}, by {provider}",
        "Platform": platform.platform(),
        "`accelerate` bash location": which("accelerate") or "Not found",
        "Python version": platform.python_version(),
        "Numpy version": np.__version__,
        "PyTorch version": torch.__version__,
        "PyTorch accelerator": "N/A" if kind is None else kind.type.upper(),
        **({"GPU type": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "System RAM": f"{psutil.virtual_memory().total / 1024**3:.2f} GB",
    }
    is_there = args.config_file is not None or Path(default_config_file).is_file()
    config = load_config_from_file(args.config_file).to_dict() if is_there else {}
    lines = [f"- {title}: {value}" for title, value in found.items()]
    lines += ["- `Accelerate` default config:"]
    lines += [f"\t- {key}: {value}" for key, value in config.items()] or ["\tNot found"]
    sys.stdout.write("\n".join(["", "Copy-and-paste the text below in your GitHub issue", "", *lines, ""]))
    return {**found, "`Accelerate` configs": config or "Not found"}


env_command_parser = partial(parser_of, "env", ReportArguments, env_command)
main = program_of("env")
