"""The checkpoints of one directory: save, load, and which is the newest.

What reads and writes is imported at its first use: a run that saves nothing starts without it.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain_checkpoint.saving.background import Background
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage import base as storage
from drivetrain_checkpoint.storage.base import Place
from drivetrain_state import Context, side_store

if TYPE_CHECKING:
    from drivetrain_checkpoint.format.state_tree import State
    from drivetrain_checkpoint.loading.load import Like, Loaded
    from drivetrain_checkpoint.planning.save_content import Content
    from drivetrain_checkpoint.saving.coordinator import Saver
    from drivetrain_checkpoint.saving.host_buffer import HostBuffer, Overlap
    from drivetrain_checkpoint.saving.retention import Keep
    from drivetrain_checkpoint.saving.transaction import Save


def _whole(name: str) -> None:
    """No tensor is divided."""
    del name


class Checkpointer:
    """The checkpoints of one directory. One object saves them all: what a save has found out serves the next.

    Args:
        context: This process among the others.
        directory: Their folder, seen by every host, or a URL as fsspec knows them, such as `s3://bucket/run`; None
            takes `settings.directory`.
        settings: The `checkpoint` section.

    Raises:
        ValueError: Neither names a directory.
        ImportError: What the URL needs is not installed; the message names it.

    Attributes:
        directory: The folder of the checkpoints: a `Path`, or for a URL a `upath.UPath`.
        settings: The `checkpoint` section.
        continues: Whether this run goes on from what the directory held before it, which retention may then delete;
            a load from it says so.
        after_commit: Called with a checkpoint's folder once it is committed, on all ranks, by the thread that wrote.
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
        models: Mapping[str, Mapping[str, "State"]],
        replicated: Mapping[str, "State"],
        per_rank: Mapping[str, "State"],
        plan: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        background: bool | None = None,
        changes_in_step: Callable[[str], bool] | None = None,
    ) -> Place:
        """Save a checkpoint. Called on all ranks, by the main thread.

        When this returns it is committed and on the disk. In the background, it returns when what this rank is to
        write has been copied to the host's memory: as many bytes again, kept for the next save. A thread then writes
        and commits, before the interpreter ends; the next call of any method waits for it and raises what went wrong.

        A state may hold tensors, NumPy arrays and plain values in any nesting of dicts, lists, tuples and sets; also
        DTensors and what is a `FlatShard` or a `Replica`, of which each rank writes parts. Until the commit earlier
        checkpoints are untouched, one of the same step too. Old ones are deleted after it.

        Args:
            step: The optimizer step, the same on all ranks; it names the folder.
            models: Each model's `state_dict()` by the model's name; rank 0's are written.
            replicated: States that are the same on all ranks, by name; rank 0's are written.
            per_rank: States that each rank has of its own, by name.
            plan: The effective plan of the run, without secrets: plain values, for the manifest.
            metrics: Numbers that tell how good it is, for `settings.keep_best`; the same on all ranks.
            background: Whether training goes on while it is written; None takes `settings.background`.
            changes_in_step: Whether a tensor, by its name as in `load`, stays as it is until `wait_for_copies` was
                called: with `settings.staging="overlap"` the thread copies it, and a change before is its error.

        Returns:
            The checkpoint's folder, `DIRECTORY/step-STEP`.

        Raises:
            StateError: A state holds something that cannot be stored: its path, type and a way out.
            ValueError: `metrics` lacks the one that tells the best, or the ranks mean different steps.
            OtherRankFailedError: Another rank failed; the message holds its error, and nothing was saved.
            FolderNotSharedError: This rank does not see the folder that rank 0 made.
            FolderInUseError: Another run writes into the directory.
            OSError: The disk is full, or the folder cannot be written; nothing was saved.
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
        """Agree on a save with the other ranks."""
        from drivetrain_checkpoint.saving.coordinator import Saver

        self._saver = self._saver or Saver(self._context, self.directory)
        return self._saver.prepare(step, content, continues=self.continues)

    def _write(self, save: "Save") -> Place:
        """Write at once."""
        from drivetrain_checkpoint.saving.transaction import run_save

        return self._tell(run_save(self._context, save, keep=self._keep(), on_block=self._mark))

    def _tell(self, path: Place) -> Place:
        """Say that a checkpoint is committed."""
        for call in self.after_commit:
            call(path)
        return path

    def _mark(self) -> None:
        self._context.watch.mark("write a checkpoint")

    def _keep(self) -> "Keep":
        from drivetrain_checkpoint.saving.retention import Keep

        return Keep.of(self.settings)

    def _start(self, save: "Save", changes_in_step: Callable[[str], bool] | None) -> Place:
        """Copy what this rank writes, or have it copied, and write it in a thread."""
        from drivetrain_checkpoint.coordination.store_gather import StoreTalk
        from drivetrain_checkpoint.saving.host_buffer import HostBuffer
        from drivetrain_checkpoint.saving.transaction import by_tensor, run_save, stage_save

        if self._buffer is None:
            self._buffer = HostBuffer()
            self._context.before_close(self.close)
        context, keep = self._context, self._keep()
        is_named = changes_in_step if self.settings.staging == "overlap" else None
        staged = stage_save(context, save, self._buffer, is_named and by_tensor(is_named))
        store = side_store(context, "drivetrain_checkpoint")

        def run() -> Place:
            if store is None:
                alone = run_save(context, staged, keep=keep, on_block=lambda: None, gather=lambda own: [own])
                return self._tell(alone)
            topology = context.topology
            talk = StoreTalk(
                store,
                staged.manifest.save_id,
                rank=topology.rank,
                world_size=topology.world_size,
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
                    staged.overlap.give_up()  # where it failed before it copied

        self._background.start(run_and_let_go, name=f"the save of step {save.step}")
        self._overlap = (
            staged.overlap
        )  # once a thread makes the copies: nobody waits for one that did not start
        return save.folder

    @property
    def is_copying(self) -> bool:
        """Whether `wait_for_copies` must be called before what was saved may change."""
        return self._overlap is not None

    def wait_for_copies(self) -> None:
        """Wait until what the save in the background was given may change; it may still be writing then.

        Does nothing where all was copied as the save began. What went wrong is raised by `wait`.
        """
        if self._overlap is not None:
            self._overlap.wait()
            self._overlap = None

    def wait(self) -> Place | None:
        """Wait for the save in the background, if there is one; its folder. Called on all ranks.

        Raises:
            Exception: What went wrong with it, as `save` would have raised it; once.
        """
        try:
            return self._background.wait()
        finally:
            self._overlap = None  # the thread that copies has ended

    def close(self) -> None:
        """Wait for the save in the background, give its memory back, and let others write. Called on all ranks.

        Raises:
            Exception: What went wrong with it.
        """
        try:
            self.wait()
        finally:
            self._buffer = None
            if self._saver is not None:
                self._saver.close()

    def load(self, path: Place | str | None = None, *, like: "Like | None" = None) -> "Loaded":
        """Read a checkpoint, everything that is read checked, and apply nothing. Called on all ranks.

        A rank reads the parts of files that it needs. They are whole tensors unless `like` says otherwise; how they
        were divided when they were saved does not matter.

        Args:
            path: The folder or URL of a checkpoint, or of a folder of checkpoints; None takes this one's. Of a folder
                of them, the one that was saved last and is good is taken; one that is damaged is passed over on all
                ranks together, with a warning.
            like: Gives, for a name such as `"models/model/fc.weight"` or `"replicated/optimizer/state/0/exp_avg"`, a
                DTensor or `FlatShard` as which this rank's part is to be divided; None for the whole tensor. One of
                another shape counts as None.

        Raises:
            NoCheckpointError: There is none.
            CorruptCheckpointError: The one that was named is damaged; the message names the file.
            FolderNotSharedError: The ranks see different checkpoints under the same path.
            PickleNotAllowedError: It holds a pickle, and `settings.allow_pickle` is not set.
        """
        from drivetrain_checkpoint.loading.load import Reading, holds_checkpoints, load_from, load_newest

        self.wait()
        how = Reading(like or _whole, self.settings.allow_pickle)
        folder = self.directory if path is None else storage.locate(path, self.settings.storage_options)
        newest = path is None or holds_checkpoints(self._context, folder)
        loaded = (load_newest if newest else load_from)(self._context, folder, how)
        self.continues |= loaded.path.parent == self.directory
        return loaded

    def latest(self) -> Place | None:
        """The folder of the newest checkpoint, by manifest and file sizes; None if there is none.

        Called on all ranks; it is what rank 0 sees.
        """
        from drivetrain_checkpoint.loading.load import newest

        self.wait()
        return newest(self._context, self.directory)
