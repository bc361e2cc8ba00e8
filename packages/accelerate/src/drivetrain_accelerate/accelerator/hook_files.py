"""The files that a program's save hooks write: beside the checkpoint until it is committed, then in its folder.

```text
checkpoint_1/
  step-400/                  the checkpoint
  unet/                      what a hook wrote before an earlier commit
  .staged/
    before                   the name of the save that was committed last when the hooks ran
    checkpoint_1/            what hooks have written since
```

Once another save than `before` is committed, the staged files belong to it: they are moved into the folder, also by
the next save or load after a kill. Until then they belong to a save that was given up, and are deleted.
"""

import os
from pathlib import Path
from shutil import rmtree

from drivetrain import CheckpointHook
from drivetrain_checkpoint import find_checkpoints
from drivetrain_checkpoint.storage.place import Place

_STAGED = ".staged"
_BEFORE = "before"


def stage(folder: Path) -> Path:
    """Return an empty folder, of the checkpoint folder's name, for what hooks write before a save.

    Called on the main process.
    """
    settle(folder)
    staged = staged_folder(folder)
    staged.mkdir(parents=True)
    (staged.parent / _BEFORE).write_text(_committed_last(folder), encoding="utf-8")
    return staged


def staged_folder(folder: Path) -> Path:
    """Return the folder for what hooks write before a save."""
    return folder / _STAGED / folder.resolve().name


def settle(folder: Path) -> None:
    """Move staged files into a folder whose save was committed; delete those of one that was given up.

    Called on the main process. What a kill has left half moved is moved to the end by the next call.
    """
    parent = folder / _STAGED
    if not parent.is_dir():
        return
    before = parent / _BEFORE
    if before.is_file() and before.read_text(encoding="utf-8") != _committed_last(folder):
        for path in staged_folder(folder).iterdir():
            place = folder / path.name
            if place.is_dir():
                rmtree(place)
            os.replace(path, place)
    rmtree(parent)
    if not any(folder.iterdir()):
        folder.rmdir()


class SettleHookFiles(CheckpointHook):
    """A hook of drivetrain's that settles what a program's hooks have written, when their save is committed."""

    def __init__(self, *, is_main: bool) -> None:
        self._is_main = is_main

    def after_commit(self, folder: Place) -> None:
        """Move the staged files into the folder of the checkpoint."""
        if self._is_main and isinstance(folder, Path):
            settle(folder.parent)


def _committed_last(folder: Path) -> str:
    """Return the name of the save that was committed last in a folder; an empty one if there is none."""
    manifests = (each.manifest for each in find_checkpoints(folder))
    return next((each.save_id for each in manifests if each is not None), "")
