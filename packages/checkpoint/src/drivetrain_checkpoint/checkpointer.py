"""The checkpoints of one directory: save, load, and which is the newest.

What reads and writes is imported at its first use: a run that saves nothing starts without it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_state import Context

if TYPE_CHECKING:
    from drivetrain_checkpoint.load import Loaded
    from drivetrain_checkpoint.tree import State


class Checkpointer:
    """The checkpoints of one directory.

    Args:
        context: This process among the others.
        directory: Their folder, seen by every host; None takes `settings.directory`.
        settings: The `checkpoint` section.

    Raises:
        ValueError: Neither names a directory.

    Attributes:
        directory: The folder of the checkpoints.
        settings: The `checkpoint` section.
    """

    def __init__(
        self,
        context: Context,
        directory: Path | str | None = None,
        *,
        settings: CheckpointSettings | None = None,
    ) -> None:
        self.settings = settings or CheckpointSettings()
        chosen = directory if directory is not None else self.settings.directory
        if chosen is None:
            raise ValueError("directory=None: name the folder of the checkpoints, here or in the settings")
        self.directory = Path(chosen).absolute()
        self._context = context

    def save(
        self,
        step: int,
        *,
        models: Mapping[str, Mapping[str, "State"]],
        replicated: Mapping[str, "State"],
        per_rank: Mapping[str, "State"],
        plan: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save a checkpoint. When this returns it is committed and on the disk. Called on all ranks.

        A state may hold tensors, NumPy arrays and plain values in any nesting of dicts, lists, tuples and sets.
        Whatever happens before the commit, earlier checkpoints are untouched, a committed one of the same step
        among them. Old ones are deleted after it, as `settings.keep_last` says.

        Args:
            step: The optimizer step, the same on all ranks; it names the folder.
            models: Each model's `state_dict()` by the model's name; rank 0's are written.
            replicated: States that are the same on all ranks, by name; rank 0's are written.
            per_rank: States that each rank has of its own, by name.
            plan: The effective plan of the run, without secrets: plain values, kept in the manifest.

        Returns:
            The checkpoint's folder, `DIRECTORY/step-STEP`.

        Raises:
            StateError: A state holds something that cannot be stored: its path, type and a way out.
            RankFailedError: Another rank failed; the message holds its error, and nothing was saved.
            FolderNotSharedError: This rank does not see the folder that rank 0 made.
            OSError: The disk is full, or the folder cannot be written; nothing was saved.
        """
        from drivetrain_checkpoint.save import Content, save

        content = Content(models=models, replicated=replicated, per_rank=per_rank, plan=plan)
        return save(self._context, self.directory, step, content, keep_last=self.settings.keep_last)

    def load(self, path: Path | str | None = None) -> "Loaded":
        """Read a checkpoint, every byte checked, and apply nothing. Called on all ranks.

        Args:
            path: A checkpoint's folder, or a folder of checkpoints; None takes this one's. Of a folder of them, the
                one that was saved last and is good is taken; one that is damaged is passed over on all ranks
                together, with a warning.

        Raises:
            NoCheckpointError: There is none.
            CorruptCheckpointError: The one that was named is damaged; the message names the file.
            FolderNotSharedError: The ranks see different checkpoints under the same path.
        """
        from drivetrain_checkpoint.load import holds_checkpoints, load_from, load_newest

        folder = self.directory if path is None else Path(path).absolute()
        if path is None or holds_checkpoints(self._context, folder):
            return load_newest(self._context, folder)
        return load_from(self._context, folder)

    def latest(self) -> Path | None:
        """The folder of the newest checkpoint, by manifest and file sizes; None if there is none.

        Called on all ranks; it is what rank 0 sees.
        """
        from drivetrain_checkpoint.load import newest

        return newest(self._context, self.directory)
