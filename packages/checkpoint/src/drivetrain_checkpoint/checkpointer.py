"""Save and load the checkpoints of one directory.

The modules that read and write are imported at first use, so that a run that saves nothing starts without them.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain_checkpoint.saving.background import Background
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage import base as storage
from drivetrain_checkpoint.storage.base import Place
from drivetrain_state import Context, control_store

if TYPE_CHECKING:
    from drivetrain_checkpoint.format.state_tree import StateTree
    from drivetrain_checkpoint.loading.load import Like, LoadResult
    from drivetrain_checkpoint.planning.save_content import Content
    from drivetrain_checkpoint.saving.coordinator import Saver
    from drivetrain_checkpoint.saving.host_buffer import HostBuffer, Overlap
    from drivetrain_checkpoint.saving.retention import Keep
    from drivetrain_checkpoint.saving.transaction import Save


def _whole(name: str) -> None:
    """Return None for every tensor: load it whole."""
    del name


class Checkpointer:
    """The checkpoints of one directory. Use one object for all saves: each save reuses the plan of the one before.

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
        continues: Whether this run resumed from a checkpoint of the directory, so that retention may delete the
            checkpoints of earlier runs; a load from the directory sets it.
        after_commit: Callbacks for a committed checkpoint; each gets its folder, on all ranks, in the thread that
            wrote it.
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
        self.directory: Place = storage.locate(chosen, self.settings.storage_options)
        self._context = context
        self._saver: Saver | None = None
        self._buffer: HostBuffer | None = None
        self._overlap: Overlap | None = None
        self._background = Background()
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
    ) -> Place:
        """Save a checkpoint. Called on all ranks, by the main thread.

        A foreground save returns once the checkpoint is committed and on the disk. A background save returns once
        this rank's tensors are copied to host memory: as many bytes again, kept for the next save. A thread then
        writes and commits before the interpreter exits; the next call of a method waits for it and raises its error.

        A state may hold tensors, NumPy arrays and plain values in any nesting of dicts, lists, tuples and sets; also
        DTensors, `FlatShard` and `Replicated` objects, of which each rank writes a part. Earlier checkpoints,
        including one of the same step, stay untouched until the commit. Old checkpoints are deleted after it.

        Args:
            step: The optimizer step, the same on all ranks; it names the folder.
            models: The `state_dict()` of each model, by the model's name; rank 0's are written.
            replicated: States that are the same on all ranks, by name; rank 0's are written.
            per_rank: States that belong to one rank each, by name.
            plan: The effective plan of the run, without secrets: plain values, for the manifest.
            metrics: Metrics of the checkpoint by name, for `settings.keep_best`; the same on all ranks.
            background: Whether training continues while the checkpoint is written; None takes `settings.background`.
            changes_in_step: A function that returns whether a tensor, by its name as in `load`, is unchanged until
                `wait_for_copies`: `settings.staging="overlap"` copies it in the thread, and fails if it changes.

        Returns:
            The checkpoint's folder, `DIRECTORY/step-STEP`.

        Raises:
            StateError: A state holds a value that cannot be stored; the message names its path, its type and a fix.
            ValueError: `metrics` lacks `settings.best_metric`, or the ranks save different steps.
            OtherRankFailedError: Another rank failed; the message holds its error, and nothing was saved.
            FolderNotSharedError: This rank does not see the folder that rank 0 made.
            CheckpointLockedError: Another run writes into the directory.
            OSError: The disk is full, or the folder is not writable; nothing was saved.
        """
        from drivetrain_checkpoint.planning.save_content import Content

        self.wait()
        content = Content(
            models=models,
            replicated=replicated,
            per_rank=per_rank,
            plan=plan,
            metrics=metrics or {},
            best_metric=self.settings.best_metric,
            allow_pickle=self.settings.allow_pickle,
        )
        save = self._agree(step, content)
        if self.settings.background if background is None else background:
            return self._start(save, changes_in_step)
        return self._write(save)

    def _agree(self, step: int, content: "Content") -> "Save":
        from drivetrain_checkpoint.saving.coordinator import Saver

        self._saver = self._saver or Saver(self._context, self.directory)
        return self._saver.prepare(step, content, continues=self.continues)

    def _write(self, save: "Save") -> Place:
        """Write the save in the calling thread."""
        from drivetrain_checkpoint.saving.transaction import run_save

        return self._tell(run_save(self._context, save, keep=self._keep(), on_block=self._mark))

    def _tell(self, path: Place) -> Place:
        """Call the callbacks for a committed checkpoint."""
        for call in self.after_commit:
            call(path)
        return path

    def _mark(self) -> None:
        self._context.watch.mark("write a checkpoint")

    def _keep(self) -> "Keep":
        from drivetrain_checkpoint.saving.retention import Keep

        return Keep.of(self.settings)

    def _start(self, save: "Save", changes_in_step: Callable[[str], bool] | None) -> Place:
        """Stage the tensors that this rank writes, now or in the thread, and write them in a thread."""
        from drivetrain_checkpoint.saving.host_buffer import HostBuffer
        from drivetrain_checkpoint.saving.store_gather import StoreGather
        from drivetrain_checkpoint.saving.transaction import by_tensor, run_save, stage_save

        if self._buffer is None:
            self._buffer = HostBuffer()
            self._context.before_close(self.close)
        context, keep = self._context, self._keep()
        is_named = changes_in_step if self.settings.staging == "overlap" else None
        staged = stage_save(context, save, self._buffer, is_named and by_tensor(is_named))
        store = control_store(context, "drivetrain_checkpoint")

        def run() -> Place:
            if store is None:
                alone = run_save(context, staged, keep=keep, on_block=lambda: None, gather=lambda own: [own])
                return self._tell(alone)
            talk = StoreGather(
                store,
                staged.manifest.save_id,
                topology=context.topology,
                stall_seconds=self.settings.stall_seconds,
            )
            try:
                path = run_save(context, staged, keep=keep, on_block=talk.progress, gather=talk.gather)
            finally:
                talk.close()
            return self._tell(path)

        def run_and_let_go() -> Place:
            try:
                return run()
            finally:
                if staged.overlap is not None:
                    staged.overlap.give_up()  # a save that failed before the copies would block wait_for_copies()

        self._background.start(run_and_let_go, name=f"the save of step {save.step}")
        # Set after the thread has started: wait_for_copies() would wait forever for one that did not.
        self._overlap = staged.overlap
        return save.folder

    @property
    def is_copying(self) -> bool:
        """True if `wait_for_copies` must be called before the saved tensors may change."""
        return self._overlap is not None

    def wait_for_copies(self) -> None:
        """Wait until the tensors of the background save may change; the save may still be writing then.

        Does nothing if `save` copied all tensors itself. `wait` raises the errors of the save.
        """
        if self._overlap is not None:
            self._overlap.wait()
            self._overlap = None

    def wait(self) -> Place | None:
        """Wait for the background save, if any, and return its folder. Called on all ranks.

        Raises:
            Exception: The error of the save, as `save` would have raised it; raised once.
        """
        try:
            return self._background.wait()
        finally:
            self._overlap = None  # the thread that copies has ended

    def close(self) -> None:
        """Wait for the background save, free its host memory and release the directory. Called on all ranks.

        Raises:
            Exception: The error of the save.
        """
        try:
            self.wait()
        finally:
            self._buffer = None
            if self._saver is not None:
                self._saver.close()

    def load(self, path: Place | str | None = None, *, like: "Like | None" = None) -> "LoadResult":
        """Read a checkpoint, verify all bytes read, and return its states without applying them. Called on all ranks.

        Each rank reads only the byte ranges it needs. Tensors are loaded whole unless `like` shards them; how they
        were sharded when they were saved does not matter.

        Args:
            path: The folder or URL of a checkpoint, or of a directory of checkpoints; None takes `self.directory`. Of
                a directory, the newest valid checkpoint is loaded; all ranks skip a damaged one together, with a
                warning.
            like: A function that returns, for a name such as `"models/model/fc.weight"` or
                `"replicated/optimizer/state/0/exp_avg"`, a DTensor or `FlatShard` that has this rank's sharding of
                the tensor, or None for the whole tensor. One of another shape counts as None.

        Raises:
            NoCheckpointError: There is no checkpoint to load.
            CorruptCheckpointError: The checkpoint at `path` is damaged; the message names the file.
            FolderNotSharedError: The ranks see different checkpoints under the same path.
            PickleNotAllowedError: The checkpoint holds a pickle, and `settings.allow_pickle` is not set.
        """
        from drivetrain_checkpoint.loading.load import LoadOptions, holds_checkpoints, load_from, load_newest

        self.wait()
        how = LoadOptions(like or _whole, self.settings.allow_pickle)
        folder = self.directory if path is None else storage.locate(path, self.settings.storage_options)
        newest = path is None or holds_checkpoints(self._context, folder)
        loaded = (load_newest if newest else load_from)(self._context, folder, how)
        self.continues |= loaded.path.parent == self.directory
        return loaded

    def latest(self) -> Place | None:
        """Return the folder of the newest checkpoint with a valid manifest and file sizes, or None.

        Called on all ranks; rank 0 looks, and all ranks get its result.
        """
        from drivetrain_checkpoint.loading.load import newest

        self.wait()
        return newest(self._context, self.directory)
