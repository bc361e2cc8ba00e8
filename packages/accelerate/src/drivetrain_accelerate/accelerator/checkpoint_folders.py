"""The folders that checkpoints are saved to and loaded from, by the names that Accelerate gives them."""

from pathlib import Path

from drivetrain_accelerate.plugins.run_configuration import ProjectConfiguration
from drivetrain_checkpoint import find_accelerate_state, find_checkpoints

_PREFIX = "checkpoint_"


def new_folder(said: str | None, project: ProjectConfiguration) -> Path:
    """Return the folder of the next checkpoint.

    Raises:
        ValueError: No folder is said, or the automatic one holds a checkpoint already.
    """
    if not project.automatic_checkpoint_naming:
        return _said(said, "save_state(output_dir=None)")
    folder = _automatic(project) / f"{_PREFIX}{project.iteration}"
    if _is_committed(folder):  # not one that a save has left without a checkpoint
        raise ValueError(
            f"{folder} exists already: say ProjectConfiguration(iteration=...) beyond the checkpoints of an earlier "
            "run, or remove it"
        )
    return folder


def newest_folder(said: str | None, project: ProjectConfiguration) -> Path:
    """Return the folder to load from.

    Raises:
        ValueError: No folder is said, it does not exist, or there is no automatic one.
    """
    if said is not None or not project.automatic_checkpoint_naming:
        folder = _said(said, "load_state(input_dir=None)")
        if not folder.is_dir():
            raise ValueError(f"load_state({str(folder)!r}): there is no such folder")
        return folder
    if not (numbered := numbered_folders(_automatic(project))):
        raise ValueError(f"load_state(): there is no checkpoint in {_automatic(project)}")
    return numbered[-1]


def surplus_folders(project: ProjectConfiguration) -> list[Path]:
    """Return the oldest automatic folders, beyond as many as the project keeps."""
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return []
    numbered = numbered_folders(_automatic(project))
    return numbered[: max(0, len(numbered) - project.total_limit)]


def numbered_folders(parent: Path) -> list[Path]:
    """Return the automatic folders in a folder that hold a checkpoint, by their numbers."""
    found = [each for each in parent.glob(f"{_PREFIX}*") if each.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(filter(_is_committed, found), key=lambda each: int(each.name.removeprefix(_PREFIX)))


def _is_committed(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint, of drivetrain or of Accelerate."""
    if not folder.is_dir():
        return False
    return (
        any(each.committed for each in find_checkpoints(folder)) or find_accelerate_state(folder) is not None
    )


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
