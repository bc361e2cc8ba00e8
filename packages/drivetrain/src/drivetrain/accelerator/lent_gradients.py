"""Gradients for steps of the program's own, where no optimizer is prepared."""

from collections.abc import Sequence

from torch import Tensor

from drivetrain.parts.parts import HasParts
from drivetrain_backends import BackwardOptions, PairingError, SupportsManualSteps


class LentGradients(HasParts):
    """The part of an Accelerator that leaves gradients to the program."""

    def backward_alone(
        self,
        loss: Tensor,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Add the gradients of a loss to `.grad`, averaged over ranks, on which the program steps by itself.

        In `no_sync()` and in an open window they stay local. No window counts the loss. Called on all ranks.

        Args:
            loss: A loss of shape (), of a prepared model without a prepared optimizer.
            retain_graph: Whether the graph is kept for another backward.
            create_graph: Whether the gradients have a graph of their own; not under DDP.
            inputs: The leaves that get gradients; None for all.

        Raises:
            PairingError: The backend divides gradients or scales losses, or the loss trains no prepared model.
            AccumulationError: No model is prepared, or an argument cannot be honoured.
        """
        backend = self._parts.backend
        if not isinstance(backend, SupportsManualSteps):
            raise PairingError(
                f"backward() without a prepared optimizer under {type(backend).__name__}: one that is not prepared "
                "knows nothing of shards and windows. Pass it to prepare() with its model"
            )
        backend.backward_alone(loss, options=options_of(retain_graph, create_graph, inputs))


_ONCE = BackwardOptions()


def options_of(retain_graph: bool, create_graph: bool, inputs: Sequence[Tensor] | None) -> BackwardOptions:
    """Return the options of a backward from torch's arguments."""
    if inputs is None and not (retain_graph or create_graph):
        return _ONCE  # in most steps: making one takes a microsecond
    return BackwardOptions(
        retain_graph=retain_graph,
        create_graph=create_graph,
        inputs=None if inputs is None else tuple(inputs),
    )
