"""The folders of checkpoints, and the files that a program's save hooks write into these folders.

```text
checkpoint_1/
  step-400/                  the checkpoint
  unet/                      files that a hook wrote before an earlier commit
  .staged/
    before                   the name of the last committed save when the hooks ran
    checkpoint_1/            files that hooks have written since
```

If the last committed save is no longer `before`, the save of the staged files was committed: they are moved into the
folder. Otherwise that save was given up, and they are deleted. After a kill, the next save or load does this.
"""

import os
from pathlib import Path
from shutil import rmtree

from drivetrain import CheckpointHook
from drivetrain_accelerate.plugins.run_configuration import ProjectConfiguration
from drivetrain_checkpoint import find_accelerate_state, find_checkpoints
from drivetrain_checkpoint.saving.writer_lock import LOCK_FILE
from drivetrain_checkpoint.storage.place import Place

_PREFIX = "checkpoint_"
_STAGED = ".staged"
_BEFORE = "before"


def new_folder(said: str | None, project: ProjectConfiguration) -> Path:
    """Return the next checkpoint's folder; with automatic names, raise a ValueError if a later number exists."""
    if not project.automatic_checkpoint_naming:
        return _require_folder(said, "save_state(output_dir=None)")
    parent = _automatic(project)
    folder = parent / f"{_PREFIX}{project.iteration}"
    if later := numbered_folders(parent, beginning=project.iteration):
        raise ValueError(
            f"save_state() would write {folder.name}, and {parent} holds {later[-1].name} of an earlier run: call "
            "load_state(), which continues the numbers, give "
            f"ProjectConfiguration(iteration={_number(later[-1]) + 1}), or name another project_dir"
        )
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    # Whatever no save has left there.
    if foreign := [name for name in names if name != LOCK_FILE and not name.startswith((".", "step-"))]:
        raise ValueError(
            f"save_state() would write to {folder}, which holds {foreign[0]} of another program, and total_limit "
            "would delete that later: move it, or name another project_dir"
        )
    return folder


def count_on(project: ProjectConfiguration) -> None:
    """Number the next checkpoint after the newest automatic one, as a load does. A new project begins at 0."""
    if project.automatic_checkpoint_naming:
        newest = numbered_folders(_automatic(project), beginning=project.iteration)[-1:]
        project.iteration = max([project.iteration, *(_number(each) + 1 for each in newest)])


def newest_folder(said: str | None, project: ProjectConfiguration) -> Path:
    """Return the folder to load: the given one, or the newest automatic one."""
    if said is not None or not project.automatic_checkpoint_naming:
        folder = _require_folder(said, "load_state(input_dir=None)")
        if not folder.is_dir():
            raise ValueError(f"load_state({str(folder)!r}): there is no such folder")
        return folder
    if not (numbered := numbered_folders(_automatic(project))):
        raise ValueError(f"load_state(): there is no checkpoint in {_automatic(project)}")
    return numbered[-1]


def surplus_folders(project: ProjectConfiguration, saved: Path) -> list[Path]:
    """Return the oldest automatic folders beyond the project's `total_limit`, without the folder just saved."""
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return []
    others = [each for each in numbered_folders(_automatic(project)) if each != saved]
    return others[: max(0, len(others) + 1 - project.total_limit)]


def numbered_folders(parent: Path, *, beginning: int = 0) -> list[Path]:
    """Return a folder's automatic folders that hold a checkpoint, sorted by number, from `beginning` on."""

    def is_committed(folder: Path) -> bool:
        by_drivetrain = folder.is_dir() and any(each.committed for each in find_checkpoints(folder))
        return by_drivetrain or find_accelerate_state(folder) is not None

    found = [each for each in parent.glob(f"{_PREFIX}*") if each.name.removeprefix(_PREFIX).isdecimal()]
    asked = [each for each in found if _number(each) >= beginning]
    return sorted(filter(is_committed, asked), key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))


def _automatic(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise ValueError(
            "ProjectConfiguration(automatic_checkpoint_naming=True) without project_dir: give the run's folder"
        )
    return Path(project.project_dir) / "checkpoints"


def _require_folder(said: str | None, call: str) -> Path:
    if said is None:
        raise ValueError(f"{call}: give a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)")
    return Path(said)


def stage(folder: Path) -> Path:
    """Return an empty folder for the files that hooks write before a save; it is named as the checkpoint folder.

    Called on the main process.
    """
    settle(folder)
    staged = staged_folder(folder)
    staged.mkdir(parents=True)
    (staged.parent / _BEFORE).write_text(_find_last_commit(folder), encoding="utf-8")
    return staged


def staged_folder(folder: Path) -> Path:
    """Return the folder for the files that hooks write before a save."""
    return folder / _STAGED / folder.resolve().name


def settle(folder: Path) -> None:
    """Move staged files into the checkpoint's folder if their save was committed, or else delete them.

    Called on the main process. If a kill interrupts the move, the next call completes it.
    """
    parent = folder / _STAGED
    if not parent.is_dir():
        return
    before = parent / _BEFORE
    if before.is_file() and before.read_text(encoding="utf-8") != _find_last_commit(folder):
        for path in staged_folder(folder).iterdir():
            place = folder / path.name
            if place.is_dir():
                rmtree(place)
            os.replace(path, place)
    rmtree(parent)
    if not any(folder.iterdir()):
        folder.rmdir()


class SettleHookFiles(CheckpointHook):
    """A drivetrain hook that moves the files of a program's hooks into place when their save is committed."""

    def __init__(self, *, is_main: bool) -> None:
        self._is_main = is_main

    def after_commit(self, folder: Place) -> None:
        """Move the staged files into the folder of the checkpoint."""
        if self._is_main and isinstance(folder, Path):
            settle(folder.parent)


def _find_last_commit(folder: Path) -> str:
    """Return the name of the last committed save in a folder; an empty text if no save was committed."""
    manifests = (each.manifest for each in find_checkpoints(folder))
    return next((each.save_id for each in manifests if each is not None), "")
