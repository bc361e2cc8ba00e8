"""Save and load the checkpoints of one directory.

A run without saves starts without the modules that read and write: their first use imports them.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage.place import Place, locate
from drivetrain_state import Context, ProgressMark

if TYPE_CHECKING:
    from drivetrain_checkpoint.format.state_tree import StateTree
    from drivetrain_checkpoint.loading.collective_load import Like, LoadResult
    from drivetrain_checkpoint.saving.background import BackgroundSaves
    from drivetrain_checkpoint.saving.coordinator import SaveCoordinator
    from drivetrain_checkpoint.saving.replicas import Replicas


class Checkpointer:
    """The checkpoints of one directory. Use one object for all saves: a save reuses the plan of the previous save.

    Args:
        context: The context of this process.
        directory: The folder of the checkpoints, visible to every host, or an fsspec URL such as `s3://bucket/run`;
            None takes `settings.directory`.
        settings: The `checkpoint` section.

    Raises:
        ValueError: Neither `directory` nor the settings name a directory.
        ImportError: A package that the URL needs is not installed; the message names it.

    Attributes:
        directory: The folder of the checkpoints: a `Path`, or for a URL a `upath.UPath`.
        settings: The `checkpoint` section.
        continues: Whether this run resumed from a checkpoint of the directory; a load from the directory sets this.
            If true, retention may delete the checkpoints of earlier runs.
        after_commit: Callbacks for a committed checkpoint. Every rank calls them with the checkpoint's folder, in the
            thread that wrote the checkpoint.
    """

    def __init__(
        self,
        context: Context,
        directory: Place | str | None = None,
        *,
        settings: CheckpointSettings | None = None,
    ) -> None:
        self.settings = settings or CheckpointSettings()
        chosen = directory if directory is not None else self.settings.directory
        if chosen is None:
            raise ValueError("directory=None: name the folder of the checkpoints, here or in the settings")
        self.directory: Place = locate(chosen, self.settings.storage_options)
        self._context = context
        self._coordinator: SaveCoordinator | None = None
        self._background: BackgroundSaves | None = None
        self.continues = False
        self.after_commit: list[Callable[[Place], object]] = []

    def save(
        self,
        step: int,
        *,
        models: Mapping[str, Mapping[str, "StateTree"]],
        replicated: Mapping[str, "StateTree"],
        per_rank: Mapping[str, "StateTree"],
        plan: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        background: bool | None = None,
        changes_in_step: Callable[[str], bool] | None = None,
        replicas: "Replicas | None" = None,
    ) -> Place:
        """Save a checkpoint. Called on all ranks, by the main thread.

        A foreground save returns once the checkpoint is committed and on the disk. A background save returns once
        this rank's tensors are copied to host memory, which the next save reuses. A thread then writes and commits,
        at the latest before the interpreter exits. The next call of a method waits for it and raises its error.

        A state may hold tensors, NumPy arrays and plain values in any nesting of dicts, lists, tuples and sets. A
        tensor may be a DTensor, `FlatShard` or `Replicated`: each rank writes a part of that tensor. Earlier
        checkpoints, even of the same step, stay until the commit. Old checkpoints are deleted after the commit.

        Args:
            step: The optimizer step, the same on all ranks; it names the folder.
            models: The `state_dict()` of each model, by the model's name; rank 0's are written.
            replicated: States that are the same on all ranks, by name; rank 0's are written.
            per_rank: States that belong to one rank each, by name.
            plan: The effective plan of the run, without secrets: plain values, for the manifest.
            metrics: Metrics of the checkpoint by name, for `settings.keep_best`; the same on all ranks.
            background: Whether training continues while the checkpoint is written; None takes `settings.background`.
            changes_in_step: A function that gets a tensor's name, as in `load`, and returns True if nothing changes
                the tensor before `wait_for_copies`. `settings.staging="overlap"` copies such a tensor in the thread;
                the save fails if the tensor changed.
            replicas: The tensors that all ranks must hold alike; `staging="overlap"` reads them in the thread.

        Returns:
            The checkpoint's folder, `DIRECTORY/step-STEP`.

        Raises:
            StateError: A state holds a value that cannot be stored; the message names its path, its type and a fix.
            ValueError: `metrics` lacks `settings.best_metric`, or the ranks save different steps.
            OtherRankFailedError: Another rank failed; the message holds its error, and nothing was saved.
            FolderNotSharedError: This rank does not see the folder that rank 0 made.
            CheckpointLockedError: Another run writes into the directory.
            OSError: The disk is full, or the folder is not writable; nothing was saved.
            Exception: The replicas differ between ranks; `replicas` makes the error, and nothing was saved.
        """
        from drivetrain_checkpoint.planning.save_content import Content
        from drivetrain_checkpoint.saving.coordinator import SaveCoordinator
        from drivetrain_checkpoint.saving.transaction import run_save

        self.wait()  # one save at a time: the thread of the last one still reads the buffer, and may delete files
        content = Content(
            models=models, replicated=replicated, per_rank=per_rank, plan=plan, metrics=metrics or {}
        )
        context = self._context
        self._coordinator = self._coordinator or SaveCoordinator(context, self.directory, self.settings)
        save = self._coordinator.prepare(step, content, continues=self.continues, replicas=replicas)
        if self.settings.background if background is None else background:
            if self._background is None:
                from drivetrain_checkpoint.saving.background import BackgroundSaves

                self._background = BackgroundSaves(context)
                context.before_close(self.close)  # the thread's agreements need the store
            self._background.start(
                save,
                on_commit=self._call_back,
                changes_in_step=changes_in_step if self.settings.staging == "overlap" else None,
            )
        else:
            run_save(context, save, on_block=lambda: context.progress.mark(ProgressMark.WRITE_CHECKPOINT))
            self._call_back(save.folder)
        return save.folder

    def _call_back(self, folder: Place) -> None:
        for call in self.after_commit:
            call(folder)

    @property
    def is_copying(self) -> bool:
        """True if `wait_for_copies` must be called before the saved tensors may change."""
        return self._background is not None and self._background.is_copying

    def wait_for_copies(self) -> None:
        """Wait until the tensors of the background save may change. The save may go on writing after that.

        Does nothing if `save` copied all tensors itself. `wait` raises the errors of the save.
        """
        if self._background is not None:
            self._background.wait_for_copies()

    def wait(self) -> Place | None:
        """Wait for the background save, if any, and return its folder. Called on all ranks.

        Raises:
            Exception: The error that `save` would have raised in the foreground. It is raised only once.
        """
        return None if self._background is None else self._background.wait()

    def close(self) -> None:
        """Wait for the background save, free its host memory and release the directory. Called on all ranks.

        Raises:
            Exception: The error of the save.
        """
        try:
            self.wait()
        finally:
            if self._background is not None:
                self._background.free_memory()
            if self._coordinator is not None:
                self._coordinator.close()

    def load(self, path: Place | str | None = None, *, like: "Like | None" = None) -> "LoadResult":
        """Read a checkpoint, verify all bytes read, and return its states without applying them. Called on all ranks.

        Each rank reads only the byte ranges it needs. Tensors are loaded whole unless `like` shards them; how they
        were sharded when they were saved does not matter.

        Args:
            path: The folder or URL of a checkpoint, or of a directory of checkpoints; None takes `self.directory`.
                From a directory, the newest valid checkpoint is loaded: all ranks skip damaged checkpoints together,
                with a warning.
            like: A function from the name of a tensor, such as `"models/model/fc.weight"` or
                `"replicated/optimizer/state/0/exp_avg"`, to a DTensor or `FlatShard` with this rank's sharding of it;
                None, or an object of another shape, loads the tensor whole.

        Raises:
            NoCheckpointError: There is no checkpoint to load.
            CorruptCheckpointError: The checkpoint at `path` is damaged; the message names the file.
            FolderNotSharedError: The ranks see different checkpoints under the same path.
            PickleNotAllowedError: The checkpoint holds a pickle, and `settings.allow_pickle` is not set.
        """
        from drivetrain_checkpoint.loading.collective_load import (
            LoadOptions,
            holds_checkpoints,
            load_from,
            load_newest,
        )

        self.wait()
        how = LoadOptions(like or (lambda _: None), self.settings.allow_pickle)
        folder = self.directory if path is None else locate(path, self.settings.storage_options)
        newest = path is None or holds_checkpoints(self._context, folder)
        loaded = (load_newest if newest else load_from)(self._context, folder, how)
        self.continues |= loaded.path.parent == self.directory
        return loaded

    def latest(self) -> Place | None:
        """Return the folder of the newest checkpoint with a valid manifest and file sizes, or None.

        Called on all ranks; rank 0 looks, and all ranks get its result.
        """
        from drivetrain_checkpoint.loading.collective_load import newest

        self.wait()
        return newest(self._context, self.directory)

    def latest_plan(self) -> Mapping[str, Any] | None:
        """Return the effective plan that the newest checkpoint holds, or None; its tensors are not read.

        Called on all ranks; rank 0 looks, and all ranks get its result.
        """
        from drivetrain_checkpoint.loading.collective_load import newest_plan

        self.wait()
        return newest_plan(self._context, self.directory)
