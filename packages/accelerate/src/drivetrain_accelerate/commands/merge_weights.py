"""Merge the weights of a sharded checkpoint into one export: of drivetrain's, or of FSDP's as torch writes it."""

import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

from drivetrain_accelerate.checkpoint_files.divided_files import merge_parts
from drivetrain_accelerate.commands.argument_parsers import arguments_of, parser_of
from drivetrain_accelerate.commands.command_line import run_words
from drivetrain_checkpoint import merge_shards
from drivetrain_checkpoint.errors import CorruptCheckpointError, NoCheckpointError
from drivetrain_checkpoint.format.layout import MANIFEST, step_folders
from drivetrain_launcher.errors import LaunchError

description = "Merge the weights of a sharded checkpoint into one export."

_TORCHS = ".metadata"  # what torch.distributed.checkpoint writes last


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeWeightsArguments:
    """The arguments of `drivetrain accelerate merge-weights`."""

    checkpoint_directory: Path = field(
        metadata={"positional": True, "help": "Folder of sharded weights, by drivetrain or by FSDP."}
    )
    output_path: Path = field(metadata={"positional": True, "help": "Folder of the export."})
    unsafe_serialization: bool = field(
        default=False,
        metadata={"help": "Write pytorch_model.bin in place of safetensors; of FSDP's folders only."},
    )
    remove_checkpoint_dir: bool = field(
        default=False, metadata={"help": "Remove the sharded weights afterwards."}
    )


def run(arguments: MergeWeightsArguments) -> int:
    """Merge the weights of a sharded checkpoint into one export."""
    try:
        _merge(arguments)
    except (ValueError, OSError, CorruptCheckpointError, NoCheckpointError) as error:
        raise LaunchError(f"accelerate merge-weights: {error}") from error
    return 0


def merge_command_parser(subparsers: Any = None) -> Any:
    """Return the parser of `accelerate merge-weights`, or add it to the subcommands of a parser."""
    return parser_of("merge-weights", MergeWeightsArguments, merge_command, subparsers)


def merge_command(args: Namespace) -> None:
    """Merge the weights of a sharded checkpoint into one export.

    Raises:
        ValueError: The folder holds no sharded weights.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    _merge(arguments_of(MergeWeightsArguments, args))


def main() -> None:
    """Run `accelerate merge-weights` as this process's command line says it."""
    run_words(["merge-weights", *sys.argv[1:]])


def _merge(arguments: MergeWeightsArguments) -> None:
    given, output = Path(arguments.checkpoint_directory), Path(arguments.output_path)
    folder = _checkpoint_in(given)
    if (folder / _TORCHS).is_file():
        merge_parts(folder, output, safe=not arguments.unsafe_serialization)
    elif (folder / MANIFEST).is_file():
        if arguments.unsafe_serialization:
            raise ValueError(
                "--unsafe_serialization: exports of drivetrain's checkpoints are safetensors; leave it out"
            )
        merge_shards(folder, output)
    else:
        raise ValueError(f"{given}: {_what_is_there(given)}")
    if arguments.remove_checkpoint_dir:
        rmtree(folder)
    sys.stdout.write(f"the weights of {folder} are in {output}\n")


def _checkpoint_in(folder: Path) -> Path:
    """Return the checkpoint that a folder of `save_state` holds, if it is the only one; else the folder itself."""
    steps = step_folders(folder) if folder.is_dir() else []
    return Path(str(steps[0])) if len(steps) == 1 else folder


def _what_is_there(folder: Path) -> str:
    """Return what to name in place of a folder that holds no sharded weights itself."""
    if not folder.is_dir():
        return "there is no such folder"
    if steps := step_folders(folder):
        return f"holds several checkpoints; name one, such as {steps[-1]}"
    if inner := sorted(found.parent.name for found in folder.glob(f"*/{_TORCHS}")):
        return f"holds no weights itself; name {folder / inner[0]}"
    return f"holds neither {MANIFEST} of a drivetrain checkpoint nor {_TORCHS} of sharded weights of FSDP"
