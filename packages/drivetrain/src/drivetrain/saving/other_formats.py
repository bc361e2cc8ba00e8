"""Runs that another library saved: the protocol of a format, and the installed ones."""

from pathlib import Path
from typing import Protocol, cast

from drivetrain.saving.resume import RunState
from drivetrain_checkpoint.format.layout import has_manifest, step_folders
from drivetrain_checkpoint.storage.place import Place
from drivetrain_config.plugins.installed import EntryPoint, entry_points
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import on_main


class RunFormat(Protocol):
    """A format in which another library saves runs, such as a module with these functions.

    A package registers its format as an entry point of the group `drivetrain.run_formats`. `load_state` first calls
    `find`, on the main process alone and only in a folder without drivetrain's checkpoints, then `load` on all ranks.
    """

    def find(self, place: Path) -> Path | None:
        """Return the folder of a saved run: the folder `place`, or one inside; None if there is no saved run."""
        ...

    def load(self, run: RunState, folder: Path) -> tuple[int, str]:
        """Load a saved run, or raise before anything is applied. Called on all ranks.

        Returns:
            The optimizer step of the saved state, and how the random number generators were restored, for the plan.
        """
        ...


def find_other_format(context: Context, place: Place) -> tuple[RunFormat, Path] | None:
    """Find another library's saved run in a folder; return its format and folder. Called on all ranks.

    Returns:
        None if the folder holds no such run.

    Raises:
        ValueError: The run is Accelerate's, and the package that reads it is not installed.
        OtherRankFailedError: The main process failed; the message holds its error.
    """

    def read_formats() -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points("drivetrain.run_formats")}

    def look() -> tuple[str, Path] | None:
        if not isinstance(place, Path) or not place.is_dir() or has_manifest(place) or step_folders(place):
            return None  # drivetrain's own run, or no folder: no other format is imported
        formats = read_formats()
        for name, point in formats.items():
            if (folder := cast("RunFormat", point.load()).find(place)) is not None:
                return name, folder
        from drivetrain_checkpoint import find_accelerate_state

        if "accelerate" not in formats and (folder := find_accelerate_state(place)) is not None:
            raise ValueError(
                f"{folder} was saved by Accelerate: install drivetrain-migration, which reads it"
            )
        return None

    found = on_main(context, look, doing=f"the load of {place}")
    return None if found is None else (cast("RunFormat", read_formats()[found[0]].load()), found[1])
