"""A hook that makes replicas which train apart equal before a save."""

from drivetrain.saving.hooks import CheckpointHook
from drivetrain_backends.local_updates.local_updates import LocalUpdates


class EqualReplicas(CheckpointHook):
    """Exchange all weights before a save or an export, and take the loaded ones for the outer weights."""

    def __init__(self, updates: LocalUpdates) -> None:
        self._updates = updates

    def before_save(self, step: int) -> None:
        """Make replicas equal, if they train apart now. Called on all ranks."""
        del step
        self.before_export()

    def before_export(self) -> None:
        """Make replicas equal, if they train apart now. Called on all ranks."""
        if self._updates.is_open:
            self._updates.exchange_all()

    def after_load(self, step: int) -> None:
        """Go on from the loaded weights. Called on all ranks."""
        del step
        self._updates.renew()
