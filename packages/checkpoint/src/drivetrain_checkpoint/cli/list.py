"""List a folder's checkpoints: step, time, size, state."""

import json
import sys
from datetime import UTC, datetime

from drivetrain_checkpoint.cli.arguments import ListArguments
from drivetrain_checkpoint.cli.given_places import directory_of, report_errors
from drivetrain_checkpoint.cli.printing import age_text, metrics_as_json, table, time_text
from drivetrain_checkpoint.format.layout import step_of
from drivetrain_checkpoint.loading.discovery import CheckpointInfo, find_checkpoints
from drivetrain_checkpoint.storage.place import storage_of
from drivetrain_messages import format_size

_HEADER = ("step", "saved at", "age", "size", "ranks", "models", "state")


@report_errors
def run(arguments: ListArguments) -> int:
    """List the checkpoints of a folder: step, time, size, and whether each is valid."""
    found = find_checkpoints(directory_of(arguments.directory))
    newest = next((one for one in found if one.is_valid), None)
    if arguments.json:
        listed = [
            {
                "folder": str(one.folder),
                "step": step_of(one.folder),
                "saved_at": one.manifest and one.manifest.saved_at,
                "size_bytes": _size_bytes(one),
                "ranks": one.manifest and one.manifest.world_size,
                "models": one.manifest and list(one.manifest.models),
                "metrics": one.manifest and metrics_as_json(one.manifest.metrics),
                "committed": one.committed,
                "valid": one.is_valid,
                "problem": one.problem,
                "newest": one is newest,
            }
            for one in found
        ]
        sys.stdout.write(f"{json.dumps(listed, indent=2, allow_nan=False)}\n")
        return 0
    now = datetime.now(UTC)
    rows: list[tuple[str, ...]] = []
    for one in found:
        said = held = ("-", "-")
        if one.manifest is not None:
            said = (time_text(one.manifest.saved_at), age_text(one.manifest.saved_at, now))
            held = (str(one.manifest.world_size), ", ".join(one.manifest.models) or "-")
        state = "valid" if one.is_valid else f"not valid: {one.problem}" if one.committed else "not completed"
        state += ", newest" if one is newest else ""
        rows.append((str(step_of(one.folder)), *said, format_size(_size_bytes(one)), *held, state))
    sys.stdout.write(table(_HEADER, rows))
    return 0


def _size_bytes(one: CheckpointInfo) -> int:
    """Return a checkpoint's size from its manifest; without a manifest, the size of the files in the folder."""
    if one.manifest is not None:
        return one.manifest.size_bytes
    return sum(storage_of(one.folder).sizes_in(one.folder).values())
