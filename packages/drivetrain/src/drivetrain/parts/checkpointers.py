"""The checkpointers of a run, one for each folder of checkpoints that it saves to or loads from."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from drivetrain_checkpoint import Checkpointer, CheckpointSettings
from drivetrain_checkpoint.storage.place import Place, locate
from drivetrain_state import Context


class Checkpointers:
    """The checkpointers that a run has used so far, by folder or URL.

    Args:
        context: The ranks, device and process group.
        settings: The `checkpoint` section.
        project_dir: The folder of the run, whose subfolder `checkpoints` is the default.
    """

    def __init__(self, context: Context, settings: CheckpointSettings, project_dir: Path | None) -> None:
        self._context = context
        self._settings = settings
        self._project_dir = project_dir
        self._by_place: dict[Place, Checkpointer] = {}

    def __iter__(self) -> Iterator[Checkpointer]:
        return iter(self._by_place.values())

    @property
    def has_default(self) -> bool:
        """True if `of(None)` has a folder: the settings name a folder, or the run has a `project_dir`."""
        return (self._settings.directory or self._project_dir) is not None

    def of(self, directory: Place | str | None) -> Checkpointer:
        """Return the checkpointer of a folder of checkpoints.

        Args:
            directory: The folder or URL; by default the checkpoint section's, or else `project_dir`/checkpoints.

        Raises:
            ValueError: No folder is given, and the settings name none.
        """
        directory = directory or self._settings.directory
        if directory is None:
            if self._project_dir is None:
                raise ValueError(
                    "saving and loading needs a folder: pass one, or set project_dir= of the Accelerator"
                )
            directory = self._project_dir / "checkpoints"
        place = locate(directory, self._settings.storage_options)
        if place not in self._by_place:
            self._by_place[place] = Checkpointer(self._context, place, settings=self._settings)
        return self._by_place[place]

    def wait(self) -> None:
        """Wait until background saves are committed. Called on all ranks."""
        for checkpointer in self:
            checkpointer.wait()

    def wait_for_copies(self) -> None:
        """Wait until background saves have copied the tensors they write, so that weights may change."""
        for checkpointer in self:
            checkpointer.wait_for_copies()

    def close(self) -> None:
        """Finish all background saves, even if one of them fails."""
        with ExitStack() as stack:
            for checkpointer in self:
                stack.callback(checkpointer.close)
