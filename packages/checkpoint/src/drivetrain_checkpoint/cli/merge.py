"""Write a sharded checkpoint's model as safetensors."""

import sys
from dataclasses import dataclass

from drivetrain_checkpoint.cli.arguments import CHECKPOINT_HELP, checkpoint_of, report_errors
from drivetrain_checkpoint.cli.printing import Progress
from drivetrain_checkpoint.export.export_plan import parse_shard_size
from drivetrain_checkpoint.export.merge import choose_model, merge_shards
from drivetrain_checkpoint.format.layout import model_part
from drivetrain_checkpoint.format.manifest import read_manifest
from drivetrain_messages import argument, format_count, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeArguments:
    """The arguments of `drivetrain checkpoint merge`."""

    checkpoint: str = argument(..., CHECKPOINT_HELP, positional=True)
    output: str = argument(..., "Folder of the export; an export in the folder is replaced.", positional=True)
    model: str | None = argument(None, "Name of the model in the checkpoint; by default the only model.")
    max_shard_size: str = argument("5GB", "Largest size of the tensors in one file: bytes, 5GB, 512MiB.")

    def __post_init__(self) -> None:
        parse_shard_size(_size(self.max_shard_size))


@report_errors
def run(arguments: MergeArguments) -> int:
    """Write a model of a sharded checkpoint as safetensors that Hugging Face's libraries read."""
    folder = checkpoint_of(arguments.checkpoint)
    manifest = read_manifest(folder)
    model = choose_model(manifest, arguments.model)
    part = model_part(model)
    total_bytes = sum(tensor.size_bytes for tensor in manifest.tensors[part].values())
    with Progress(f"merge {model}", total_bytes) as progress:
        plan = merge_shards(
            folder,
            arguments.output,
            model=model,
            max_shard_size=_size(arguments.max_shard_size),
            on_bytes=progress.advance,
        )
    for file, names in plan.files.items():
        size_bytes = sum(plan.tensors[name].size_bytes for name in names)
        sys.stdout.write(f"{file}: {format_count(len(names), 'tensor')}, {format_size(size_bytes)}\n")
    for name, stored in plan.ties.items():
        sys.stdout.write(f"{name} is {stored}\n")
    return 0


def _size(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
