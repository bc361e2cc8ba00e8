"""Delete old checkpoints, and what unfinished saves left."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drivetrain_checkpoint.cli.arguments import DIRECTORY_HELP, WRONG, directory_of, report_errors
from drivetrain_checkpoint.loading.discovery import CheckpointInfo, find_checkpoints
from drivetrain_checkpoint.saving.retention import delete, plan_retention
from drivetrain_checkpoint.saving.writer_lock import lock_of
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage.place import Place, storage_of
from drivetrain_messages import argument, format_count, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneArguments:
    """The arguments of `drivetrain checkpoint prune`."""

    directory: str = argument(..., DIRECTORY_HELP, positional=True)
    keep_last: int = argument(..., "Number of valid checkpoints to keep, those saved last.")
    keep_every: int | None = argument(None, "Interval in steps of checkpoints to keep too, such as 10000.")
    keep_best: int = argument(0, "Number of best checkpoints by best_metric to keep too.")
    best_metric: str | None = argument(None, "Name of a save's metric that rates checkpoints.")
    best_mode: Literal["min", "max"] = argument(
        "min", "Whether the smallest or the largest value is the best."
    )
    dry_run: bool = argument(False, "List the folders to delete, and delete nothing.")

    def __post_init__(self) -> None:
        """Check the rules in the same way as the `checkpoint` section."""
        _ = self.keep

    @property
    def keep(self) -> CheckpointSettings:
        """The rules for which checkpoints to keep."""
        return CheckpointSettings(
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            keep_best=self.keep_best,
            best_metric=self.best_metric,
            best_mode=self.best_mode,
        )


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
