"""Plan which checkpoints to keep and delete the others, after a newer one is committed."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from drivetrain_checkpoint.format.layout import MANIFEST, has_manifest, own_files
from drivetrain_checkpoint.loading.discovery import CheckpointInfo
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage.place import Place, storage_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The rules for which checkpoints of a directory to keep.

    Attributes:
        last: The number of newest checkpoints to keep; None keeps all.
        every: The interval in steps: checkpoints at its multiples are kept too.
        best: The number of best checkpoints by `metric` to keep too.
        metric: The name of a metric given with the saves. A checkpoint with a NaN is never among the best.
        largest: Whether the largest value is the best, not the smallest.
    """

    last: int | None = None
    every: int | None = None
    best: int = 0
    metric: str | None = None
    largest: bool = False

    @classmethod
    def of(cls, settings: CheckpointSettings) -> Self:
        """Return the rules of the `checkpoint` section."""
        return cls(
            last=settings.keep_last,
            every=settings.keep_every,
            best=settings.keep_best,
            metric=settings.best_metric,
            largest=settings.best_mode == "max",
        )


def plan_retention(found: Sequence[CheckpointInfo], keep: Keep) -> tuple[Place, ...]:
    """Return the folders to delete.

    These are the valid checkpoints that no rule of `keep` covers, and the leftovers of incomplete saves. Committed
    checkpoints that are damaged are left for inspection. Without a valid checkpoint nothing is deleted.

    Args:
        found: The checkpoints of the directory, last saved first, as `find_checkpoints` returns them.
        keep: The rules for which checkpoints to keep.
    """
    valid = [one for one in found if one.is_valid]
    if keep.last is None or not valid:
        return ()
    stay = {one.folder for one in valid[: keep.last]} | {one.folder for one in _best(valid, keep)}
    if keep.every is not None:
        stay |= {one.folder for one in valid if one.manifest and one.manifest.step % keep.every == 0}
    old = [one for one in valid if one.folder not in stay]
    return tuple(one.folder for one in (*old, *(one for one in found if not one.committed)))


def _best(valid: Sequence[CheckpointInfo], keep: Keep) -> list[CheckpointInfo]:
    """Return the best checkpoints by the metric; of equal ones, the newest."""
    measured = [
        (value, one)
        for one in valid
        if one.manifest is not None
        and (value := one.manifest.metrics.get(keep.metric or "")) is not None
        and not math.isnan(value)
    ]
    ranked = sorted(measured, key=lambda pair: -pair[0] if keep.largest else pair[0])
    return [one for _, one in ranked[: keep.best]]


def delete(folders: Sequence[Place]) -> None:
    """Delete checkpoints, each manifest first: an interrupted deletion leaves an incomplete save, not a damaged one.

    Log a warning for a folder that cannot be deleted: the checkpoint that was just saved is valid all the same.
    """
    for folder in folders:
        try:
            if has_manifest(folder):
                storage_of(folder).remove([folder / MANIFEST])
            storage_of(folder).remove(own_files(folder))
            storage_of(folder).remove_folder(folder)
        except OSError as error:
            logger.warning("the old checkpoint %s could not be deleted whole: %s", folder, error)
