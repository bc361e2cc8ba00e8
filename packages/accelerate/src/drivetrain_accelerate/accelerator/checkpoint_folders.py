"""The folders that checkpoints are saved to and loaded from, by the names that Accelerate gives them."""

from pathlib import Path

from drivetrain_accelerate.plugins.run_configuration import ProjectConfiguration
from drivetrain_checkpoint import find_accelerate_state, find_checkpoints
from drivetrain_checkpoint.saving.writer_lock import LOCK_FILE

_PREFIX = "checkpoint_"


def new_folder(said: str | None, project: ProjectConfiguration) -> Path:
    """Return the folder of the next checkpoint; its number is the highest of all automatic ones."""
    if not project.automatic_checkpoint_naming:
        return _said(said, "save_state(output_dir=None)")
    parent = _automatic(project)
    folder = parent / f"{_PREFIX}{project.iteration}"
    if later := numbered_folders(parent, beginning=project.iteration):
        raise ValueError(
            f"save_state() would write {folder.name}, and {parent} holds {later[-1].name} of an earlier run: call "
            "load_state(), after which numbers go on, say "
            f"ProjectConfiguration(iteration={_number(later[-1]) + 1}), or name another project_dir"
        )
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    # Whatever no save has left there.
    if foreign := [name for name in names if name != LOCK_FILE and not name.startswith((".", "step-"))]:
        raise ValueError(
            f"save_state() would write to {folder}, which holds {foreign[0]} of another program, and total_limit "
            "would delete that one day: move it, or name another project_dir"
        )
    return folder


def count_on(project: ProjectConfiguration) -> None:
    """Have the next checkpoint follow the newest automatic one, as after a load: a project begins at 0."""
    if project.automatic_checkpoint_naming:
        newest = numbered_folders(_automatic(project), beginning=project.iteration)[-1:]
        project.iteration = max([project.iteration, *(_number(each) + 1 for each in newest)])


def newest_folder(said: str | None, project: ProjectConfiguration) -> Path:
    """Return the folder to load from."""
    if said is not None or not project.automatic_checkpoint_naming:
        folder = _said(said, "load_state(input_dir=None)")
        if not folder.is_dir():
            raise ValueError(f"load_state({str(folder)!r}): there is no such folder")
        return folder
    if not (numbered := numbered_folders(_automatic(project))):
        raise ValueError(f"load_state(): there is no checkpoint in {_automatic(project)}")
    return numbered[-1]


def surplus_folders(project: ProjectConfiguration, saved: Path) -> list[Path]:
    """Return the oldest automatic folders beyond as many as the project keeps, never the one that was just saved."""
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return []
    others = [each for each in numbered_folders(_automatic(project)) if each != saved]
    return others[: max(0, len(others) + 1 - project.total_limit)]


def numbered_folders(parent: Path, *, beginning: int = 0) -> list[Path]:
    """Return the automatic folders in a folder that hold a checkpoint, by their numbers, from one of them on."""

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
            "ProjectConfiguration(automatic_checkpoint_naming=True) without project_dir: say the run's folder"
        )
    return Path(project.project_dir) / "checkpoints"


def _said(said: str | None, call: str) -> Path:
    if said is None:
        raise ValueError(f"{call}: say a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)")
    return Path(said)
