"""Merge a sharded checkpoint's weights into one export."""

import sys
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree

from drivetrain_accelerate.checkpoint_files.sharded_files import merge_parts
from drivetrain_accelerate.commands.command_line import parser_of, program_of
from drivetrain_checkpoint import merge_shards
from drivetrain_checkpoint.errors import CorruptCheckpointError, NoCheckpointError
from drivetrain_checkpoint.format.layout import MANIFEST, step_folders
from drivetrain_launcher.errors import LaunchError
from drivetrain_messages import argument

description = "Merge the weights of a sharded checkpoint into one export."

_TORCHS = ".metadata"  # what torch.distributed.checkpoint writes last


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeWeightsArguments:
    """The arguments of `drivetrain accelerate merge-weights`."""

    checkpoint_directory: Path = argument(
        ..., "Folder of sharded weights, by drivetrain or by FSDP.", positional=True
    )
    output_path: Path = argument(..., "Folder of the export.", positional=True)
    unsafe_serialization: bool = argument(
        False, "Write pytorch_model.bin in place of safetensors; of FSDP's folders only."
    )
    remove_checkpoint_dir: bool = argument(False, "Remove the sharded weights afterwards.")


def run(arguments: MergeWeightsArguments) -> int:
    """Merge the weights of a sharded checkpoint into one export."""
    try:
        merge_command(arguments)
    except (ValueError, OSError, CorruptCheckpointError, NoCheckpointError) as error:
        raise LaunchError(f"accelerate merge-weights: {error}") from error
    return 0


def merge_command(args: Namespace | MergeWeightsArguments) -> None:
    """Merge the weights of a sharded checkpoint into one export; raise a ValueError if the folder holds none."""
    given, output = Path(args.checkpoint_directory), Path(args.output_path)
    steps = step_folders(given) if given.is_dir() else []
    # A folder of `save_state` stands for the only checkpoint that it holds.
    folder = Path(str(steps[0])) if len(steps) == 1 else given
    if (folder / _TORCHS).is_file():
        merge_parts(folder, output, safe=not args.unsafe_serialization)
    elif (folder / MANIFEST).is_file():
        if args.unsafe_serialization:
            raise ValueError(
                "--unsafe_serialization: exports of drivetrain's checkpoints are safetensors; leave it out"
            )
        merge_shards(folder, output)
    elif not given.is_dir():
        raise ValueError(f"{given}: there is no such folder")
    elif steps:
        raise ValueError(f"{given}: holds several checkpoints; name one, such as {steps[-1]}")
    elif inner := sorted(found.parent.name for found in given.glob(f"*/{_TORCHS}")):
        raise ValueError(f"{given}: holds no weights itself; name {given / inner[0]}")
    else:
        raise ValueError(
            f"{given}: holds neither {MANIFEST} of a drivetrain checkpoint nor {_TORCHS} of sharded weights of FSDP"
        )
    if args.remove_checkpoint_dir:
        rmtree(folder)
    sys.stdout.write(f"the weights of {folder} are in {output}\n")


merge_command_parser = partial(parser_of, "merge-weights", MergeWeightsArguments, merge_command)
main = program_of("merge-weights")
