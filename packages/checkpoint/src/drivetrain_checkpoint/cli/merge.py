"""Write a sharded checkpoint's model as safetensors."""

import sys

from drivetrain_checkpoint.cli.arguments import MergeArguments
from drivetrain_checkpoint.cli.given_places import checkpoint_of, report_errors
from drivetrain_checkpoint.cli.printing import Progress
from drivetrain_checkpoint.export.merge import choose_model, merge_shards
from drivetrain_checkpoint.format.layout import model_part
from drivetrain_checkpoint.format.manifest import read_manifest
from drivetrain_messages import format_count, format_size


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
            max_shard_size=arguments.max_shard_bytes,
            on_bytes=progress.advance,
        )
    for file, names in plan.files.items():
        size_bytes = sum(plan.tensors[name].size_bytes for name in names)
        sys.stdout.write(f"{file}: {format_count(len(names), 'tensor')}, {format_size(size_bytes)}\n")
    for name, stored in plan.ties.items():
        sys.stdout.write(f"{name} is {stored}\n")
    return 0
