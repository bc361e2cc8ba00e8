"""Which checkpoints stay: a plan, then its execution, both only after a newer one is committed."""

import logging
from collections.abc import Sequence
from pathlib import Path

from drivetrain_checkpoint.layout import MANIFEST, own_files
from drivetrain_checkpoint.survey import Found

logger = logging.getLogger(__name__)


def plan_retention(found: Sequence[Found], *, keep_last: int | None) -> tuple[Path, ...]:
    """The folders to delete.

    The `keep_last` valid checkpoints that were saved last stay. Older valid ones go, and so do leftovers of saves
    that were never completed. A committed checkpoint that is damaged is left for its owner to look at. With no
    valid checkpoint nothing is deleted.

    Args:
        found: The last saved first, as `find_checkpoints` gives it.
        keep_last: At least 1; None keeps all.
    """
    valid = [one for one in found if one.is_valid]
    if keep_last is None or not valid:
        return ()
    leftovers = [one for one in found if not one.committed]
    return tuple(one.folder for one in (*valid[keep_last:], *leftovers))


def delete(folders: Sequence[Path]) -> None:
    """Delete checkpoints, each manifest first: one that is interrupted leaves an uncompleted save, not a torn one.

    A folder that cannot be deleted is a warning: the checkpoint that was just saved is good all the same.
    """
    for folder in folders:
        try:
            (folder / MANIFEST).unlink(missing_ok=True)
            for path in own_files(folder):
                path.unlink()
            folder.rmdir()
        except OSError as error:
            logger.warning("the old checkpoint %s could not be deleted whole: %s", folder, error)
