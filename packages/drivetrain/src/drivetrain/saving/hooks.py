"""A base class of user hooks around saves and loads of a run."""

from drivetrain_checkpoint.storage.place import Place


class CheckpointHook:
    """A base class of hooks for `Accelerator.register_checkpoint_hook`; override the methods you need.

    Hooks are called in the order of their registration. The save or load raises any error of a hook.

    Example:
        >>> class Announce(CheckpointHook):
        ...     def after_commit(self, folder):
        ...         print("saved", folder.name)
    """

    def before_save(self, step: int) -> None:
        """Run before any state is read. Called on all ranks, by the main thread; may use collectives.

        Args:
            step: The optimizer step that is saved.
        """

    def before_export(self) -> None:
        """Run before `save_model` reads a model. Called on all ranks, by the main thread; may use collectives."""

    def after_commit(self, folder: Place) -> None:
        """Run when the checkpoint is committed. Called on all ranks, by the thread that wrote it: use no collectives.

        Args:
            folder: The folder of the checkpoint, which is complete and may be copied.
        """

    def before_load(self) -> None:
        """Run before a checkpoint is searched for. Called on all ranks, by the main thread."""

    def after_load(self, step: int) -> None:
        """Run when all state is loaded. Called on all ranks, by the main thread.

        Args:
            step: The optimizer step of the checkpoint.
        """
