"""Delete old checkpoints of a folder, and what is left of saves that were never completed."""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from drivetrain_checkpoint.cli.given import DIRECTORY_HELP, WRONG, directory_of, told
from drivetrain_checkpoint.cli.printing import counted, size_text
from drivetrain_checkpoint.loading.discovery import Found, find_checkpoints
from drivetrain_checkpoint.saving.retention import Keep, delete, plan_retention
from drivetrain_checkpoint.saving.writer_lock import lease_of
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage import base as storage
from drivetrain_checkpoint.storage.base import Place
from drivetrain_config import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneArguments:
    """What `drivetrain checkpoint prune` is told."""

    directory: str = field(metadata={"positional": True, "help": DIRECTORY_HELP})
    keep_last: int = field(metadata={"help": "Number of valid checkpoints to keep, those saved last."})
    keep_every: int | None = field(
        default=None, metadata={"help": "Keep those of every so many steps too, such as 10000."}
    )
    keep_best: int = field(
        default=0, metadata={"help": "Number of checkpoints to keep besides, the best ones by best_metric."}
    )
    best_metric: str | None = field(
        default=None, metadata={"help": "Which of the metrics given with a save tells the best."}
    )
    best_mode: Literal["min", "max"] = field(
        default="min", metadata={"help": "Whether the smallest or the largest value is the best."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Say what would be deleted, and delete nothing."})

    def __post_init__(self) -> None:
        """Check the rules, which are those of the section's fields."""
        _ = self.keep

    @property
    def keep(self) -> Keep:
        """What stays."""
        return Keep.of(
            CheckpointSettings(
                keep_last=self.keep_last,
                keep_every=self.keep_every,
                keep_best=self.keep_best,
                best_metric=self.best_metric,
                best_mode=self.best_mode,
            )
        )


@told
def run(arguments: PruneArguments) -> int:
    """Delete what retention says, and print it.

    Returns:
        0; 1 if something could not be deleted whole.
    """
    directory = directory_of(arguments.directory)
    if arguments.dry_run:
        _say(plan_of(directory, arguments.keep), "would delete")
        return 0
    with _writing(directory):
        plan = plan_of(directory, arguments.keep)
        _say(plan, "delete")
        delete([one.folder for one in plan.going])
    return WRONG if any(storage.is_folder(one.folder) for one in plan.going) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What goes and what stays.

    Attributes:
        going: What is deleted.
        staying: What is kept.
        sizes: The bytes of each folder that goes.
    """

    going: Sequence[Found]
    staying: Sequence[Found]
    sizes: Sequence[int]


def plan_of(directory: Place, keep: Keep) -> PrunePlan:
    """Look at a directory, and decide.

    Raises:
        ValueError: No checkpoint has the metric that is to tell the best.
    """
    found = find_checkpoints(directory)
    known = {name for one in found if one.manifest for name in one.manifest.metrics}
    if keep.best and keep.metric not in known and any(one.is_valid for one in found):
        raise ValueError(
            f"best_metric={keep.metric!r}: no checkpoint of {directory} was saved with it; they have "
            f"{', '.join(sorted(known)) or 'no metrics'}"
        )
    chosen = set(plan_retention(found, keep))
    going = [one for one in found if one.folder in chosen]
    return PrunePlan(
        going=going,
        staying=[one for one in found if one.folder not in chosen],
        sizes=[sum(storage.sizes_in(one.folder).values()) for one in going],
    )


@contextmanager
def _writing(directory: Place) -> Generator[None]:
    """Be the directory's one writer: what a run is just saving looks like a save that was never completed."""
    lease = lease_of(directory)
    if lease is None:
        yield
        return
    lease.take()
    try:
        yield
    finally:
        lease.release()


def _say(plan: PrunePlan, doing: str) -> None:
    for one, size_bytes in zip(plan.going, plan.sizes, strict=True):
        why = "" if one.committed else ", never completed"
        sys.stdout.write(f"{doing} {one.folder.name} ({size_text(size_bytes)}{why})\n")
    for one in plan.staying:
        if one.is_valid:
            sys.stdout.write(f"keep {one.folder.name}\n")
        else:
            # Without a valid checkpoint nothing goes: what is damaged may be all there is.
            sys.stdout.write(f"keep {one.folder.name}, to be looked at: {one.problem}\n")
    freed = size_text(sum(plan.sizes))
    sys.stdout.write(f"{doing} {counted(len(plan.going), 'folder')}, {freed}\n")


command = Command(
    arguments=PruneArguments,
    run=run,
    help="Delete old checkpoints of a folder, and what is left of saves that were never completed.",
)
