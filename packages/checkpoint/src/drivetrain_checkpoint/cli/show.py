"""Show a checkpoint: models, files, tensors, ranks."""

import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from drivetrain_checkpoint.cli.arguments import NUM_SHOWN, ShowArguments
from drivetrain_checkpoint.cli.given_places import checkpoint_of, report_errors
from drivetrain_checkpoint.cli.printing import age_text, metrics_as_json, table, time_text
from drivetrain_checkpoint.format.manifest import Manifest, encode_plan, read_manifest
from drivetrain_checkpoint.loading.discovery import inspect
from drivetrain_checkpoint.storage.place import Place
from drivetrain_messages import format_count, format_size


@report_errors
def run(arguments: ShowArguments) -> int:
    """Show the content of a checkpoint: when and by how many ranks it was saved, its models, files and tensors."""
    folder = checkpoint_of(arguments.checkpoint)
    manifest = read_manifest(folder)
    problem = inspect(folder).problem
    if arguments.json:
        sys.stdout.write(f"{json.dumps(_as_json(folder, manifest, problem), indent=2, allow_nan=False)}\n")
        return 0
    sys.stdout.write(_summary(folder, manifest, problem))
    files = [(record.name, format_size(record.size_bytes)) for record in manifest.files.values()]
    sys.stdout.write("\n" + table(("file", "size"), files))
    for part, tensors in manifest.tensors.items():
        if not tensors:
            continue
        shown = list(tensors.items())[: None if arguments.tensors else NUM_SHOWN]
        size = format_size(sum(tensor.size_bytes for tensor in tensors.values()))
        rows = [
            (name, tensor.dtype, str(list(tensor.shape)), str(tensor.num_pieces)) for name, tensor in shown
        ]
        sys.stdout.write(f"\n{part}: {format_count(len(tensors), 'tensor')}, {size}\n")
        sys.stdout.write(table(("name", "dtype", "shape", "pieces"), rows))
        if left := len(tensors) - len(shown):
            sys.stdout.write(f"... and {left} more; --tensors lists all\n")
    if manifest.plan is not None:
        sys.stdout.write("\n" + table(("plan", "value"), list(_flattened(manifest.plan))))
    return 0


def _as_json(folder: Place, manifest: Manifest, problem: str | None) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "step": manifest.step,
        "sequence": manifest.sequence,
        "saved_at": manifest.saved_at,
        "ranks": manifest.world_size,
        "mesh": dict(manifest.mesh),
        "models": list(manifest.models),
        "metrics": metrics_as_json(manifest.metrics),
        "libraries": dict(manifest.libraries),
        "size_bytes": manifest.size_bytes,
        "problem": problem,
        "files": {record.name: record.size_bytes for record in manifest.files.values()},
        "tensors": {
            part: {
                name: {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "size_bytes": tensor.size_bytes,
                    "pieces": tensor.num_pieces,
                }
                for name, tensor in tensors.items()
            }
            for part, tensors in manifest.tensors.items()
        },
        "plan": encode_plan(manifest.plan),
    }


def _summary(folder: Place, manifest: Manifest, problem: str | None) -> str:
    mesh = _pairs(manifest.mesh)
    age = age_text(manifest.saved_at, datetime.now(UTC))
    rows = {
        "checkpoint": str(folder),
        "step": f"{manifest.step}, save {manifest.sequence} into its folder",
        "saved": f"{time_text(manifest.saved_at)}, {age} ago",
        "ranks": f"{manifest.world_size}{f', as {mesh}' if mesh else ''}",
        "models": ", ".join(manifest.models) or "none",
        "metrics": _pairs(manifest.metrics) or "none",
        "size": f"{format_size(manifest.size_bytes)} in {format_count(len(manifest.files), 'file')}",
        "written by": ", ".join(f"{name} {version}" for name, version in manifest.libraries.items()),
        "state": f"not valid: {problem}" if problem else "valid: every file is there in its size",
    }
    return "".join(f"{name:<10}  {value}\n" for name, value in rows.items())


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _flattened(plan: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path and text of each value in a plan."""
    for key, value in plan.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
