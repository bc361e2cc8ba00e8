"""Which checkpoints stay: a plan, then its execution, both only after a newer one is committed."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from drivetrain_checkpoint.format.layout import MANIFEST, own_files
from drivetrain_checkpoint.loading.discovery import Found
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage import base as storage
from drivetrain_checkpoint.storage.base import Place

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What stays of a directory's checkpoints.

    Attributes:
        last: As many as that, the newest ones; None keeps all.
        every: Also those of the steps that it divides.
        best: Also as many as that, the best ones by `metric`.
        metric: Of those that were given with the saves. A NaN is never among the best.
        largest: Whether the largest value is the best, not the smallest.
    """

    last: int | None = None
    every: int | None = None
    best: int = 0
    metric: str | None = None
    largest: bool = False

    @classmethod
    def of(cls, settings: CheckpointSettings) -> Self:
        """What the `checkpoint` section says."""
        return cls(
            last=settings.keep_last,
            every=settings.keep_every,
            best=settings.keep_best,
            metric=settings.best_metric,
            largest=settings.best_mode == "max",
        )


def plan_retention(found: Sequence[Found], keep: Keep) -> tuple[Place, ...]:
    """The folders to delete.

    Valid checkpoints that no rule of `keep` names go, and so do leftovers of saves that were never completed. A
    committed checkpoint that is damaged is left for its owner to look at. With no valid one nothing is deleted.

    Args:
        found: The last saved first, as `find_checkpoints` gives it.
        keep: What stays.
    """
    valid = [one for one in found if one.is_valid]
    if keep.last is None or not valid:
        return ()
    stay = {one.folder for one in valid[: keep.last]} | {one.folder for one in _best(valid, keep)}
    if keep.every is not None:
        stay |= {one.folder for one in valid if one.manifest and one.manifest.step % keep.every == 0}
    old = [one for one in valid if one.folder not in stay]
    return tuple(one.folder for one in (*old, *(one for one in found if not one.committed)))


def _best(valid: Sequence[Found], keep: Keep) -> list[Found]:
    """The best by the metric; of equal ones the newest."""
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
    """Delete checkpoints, each manifest first: one that is interrupted leaves an uncompleted save, not a torn one.

    A folder that cannot be deleted is a warning: the checkpoint that was just saved is good all the same.
    """
    for folder in folders:
        try:
            if storage.is_file(folder / MANIFEST):
                storage.remove([folder / MANIFEST])
            storage.remove(own_files(folder))
            storage.remove_folder(folder)
        except OSError as error:
            logger.warning("the old checkpoint %s could not be deleted whole: %s", folder, error)
