"""Delete old checkpoints, and what unfinished saves left."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain_checkpoint.cli.arguments import PruneArguments
from drivetrain_checkpoint.cli.given_places import WRONG, directory_of, report_errors
from drivetrain_checkpoint.loading.discovery import CheckpointInfo, find_checkpoints
from drivetrain_checkpoint.saving.retention import delete, plan_retention
from drivetrain_checkpoint.saving.writer_lock import lock_of
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage.place import Place, storage_of
from drivetrain_messages import format_count, format_size


@report_errors
def run(arguments: PruneArguments) -> int:
    """Delete the old checkpoints of a folder and the leftovers of incomplete saves."""
    directory = directory_of(arguments.directory)
    if arguments.dry_run:
        _say(plan_of(directory, arguments.keep), "would delete")
        return 0
    # As the directory's only writer: the save of a running job looks like an incomplete save.
    lock = lock_of(directory)
    if lock is not None:
        lock.take()
    try:
        plan = plan_of(directory, arguments.keep)
        _say(plan, "delete")
        delete([one.folder for one in plan.going])
    finally:
        if lock is not None:
            lock.release()
    return WRONG if any(storage_of(one.folder).is_folder(one.folder) for one in plan.going) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """The plan of which checkpoints to delete and which to keep."""

    going: Sequence[CheckpointInfo]
    staying: Sequence[CheckpointInfo]
    sizes: Sequence[int]


def plan_of(directory: Place, keep: CheckpointSettings) -> PrunePlan:
    """Plan which checkpoints of a directory to delete."""
    found = find_checkpoints(directory)
    known = {name for one in found if one.manifest for name in one.manifest.metrics}
    if keep.keep_best and keep.best_metric not in known and any(one.is_valid for one in found):
        raise ValueError(
            f"best_metric={keep.best_metric!r}: no checkpoint of {directory} was saved with it; they have "
            f"{', '.join(sorted(known)) or 'no metrics'}"
        )
    chosen = set(plan_retention(found, keep))
    going = [one for one in found if one.folder in chosen]
    return PrunePlan(
        going=going,
        staying=[one for one in found if one.folder not in chosen],
        sizes=[sum(storage_of(one.folder).sizes_in(one.folder).values()) for one in going],
    )


def _say(plan: PrunePlan, doing: str) -> None:
    for one, size_bytes in zip(plan.going, plan.sizes, strict=True):
        why = "" if one.committed else ", never completed"
        sys.stdout.write(f"{doing} {one.folder.name} ({format_size(size_bytes)}{why})\n")
    for one in plan.staying:
        if one.is_valid:
            sys.stdout.write(f"keep {one.folder.name}\n")
        else:
            # A damaged checkpoint, or without a valid one also an incomplete save: they may be all there is.
            sys.stdout.write(f"keep {one.folder.name}, to be looked at: {one.problem}\n")
    freed = format_size(sum(plan.sizes))
    sys.stdout.write(f"{doing} {format_count(len(plan.going), 'folder')}, {freed}\n")
