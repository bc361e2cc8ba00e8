"""What a user's code may do when a run is saved or taken up."""

from drivetrain_checkpoint.storage.base import Place


class CheckpointHook:
    """Override what you need; an error in any of them is raised where the save or load is.

    Given to `Accelerator.register_checkpoint_hook`. Hooks are called in the order of their registration.
    """

    def before_save(self, step: int) -> None:
        """Before anything is looked at. Called on all ranks, by the main thread; may use collectives.

        Args:
            step: The optimizer step that is saved.
        """

    def after_commit(self, folder: Place) -> None:
        """When the checkpoint is committed. Called on all ranks, by the thread that wrote it: use no collectives.

        Args:
            folder: The checkpoint's, which is whole now and may be copied.
        """

    def before_load(self) -> None:
        """Before a checkpoint is looked for. Called on all ranks, by the main thread."""

    def after_load(self, step: int) -> None:
        """When everything has been taken up. Called on all ranks, by the main thread.

        Args:
            step: The optimizer step it was saved at.
        """
