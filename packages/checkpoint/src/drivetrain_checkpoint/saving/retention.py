"""Plan which checkpoints to keep and delete the others, after a newer one is committed."""

import logging
import math
from collections.abc import Sequence

from drivetrain_checkpoint.format.layout import MANIFEST, has_manifest, own_files
from drivetrain_checkpoint.loading.discovery import CheckpointInfo
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage.place import Place, storage_of

logger = logging.getLogger(__name__)


def plan_retention(found: Sequence[CheckpointInfo], settings: CheckpointSettings) -> tuple[Place, ...]:
    """Return the folders to delete; `found` are the checkpoints of the directory, last saved first.

    Deleted are the valid checkpoints that no rule of the settings keeps, and the leftovers of incomplete saves.
    Committed checkpoints that are damaged are left for inspection. Without a valid checkpoint nothing is deleted.
    """
    valid = [one for one in found if one.is_valid]
    if settings.keep_last is None or not valid:
        return ()
    newest = valid[: settings.keep_last]
    measured = [
        (value, one)
        for one in valid
        if one.manifest is not None
        and (value := one.manifest.metrics.get(settings.best_metric or "")) is not None
        and not math.isnan(value)
    ]
    # Of equal ones, the newest come first.
    ranked = sorted(measured, key=lambda pair: -pair[0] if settings.best_mode == "max" else pair[0])
    best = [one for _, one in ranked[: settings.keep_best]]
    stay = {one.folder for one in (*newest, *best)}
    if settings.keep_every is not None:
        stay |= {one.folder for one in valid if one.manifest and one.manifest.step % settings.keep_every == 0}
    old = [one for one in valid if one.folder not in stay]
    return tuple(one.folder for one in (*old, *(one for one in found if not one.committed)))


def delete(folders: Sequence[Place]) -> None:
    """Delete checkpoints, manifests first: an interrupted deletion leaves an incomplete save, no damaged checkpoint.

    If a folder cannot be deleted, log a warning: the checkpoint that was just saved is valid all the same.
    """
    for folder in folders:
        try:
            if has_manifest(folder):
                storage_of(folder).remove([folder / MANIFEST])
            storage_of(folder).remove(own_files(folder))
            storage_of(folder).remove_folder(folder)
        except OSError as error:
            logger.warning("the old checkpoint %s could not be deleted whole: %s", folder, error)
