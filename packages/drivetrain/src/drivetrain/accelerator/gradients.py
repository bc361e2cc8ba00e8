"""Clip gradients, and compute them for a program that steps by itself."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from drivetrain.parts.parts import HasParts
from drivetrain_backends import BackwardOptions, PairingError, SupportsManualSteps


class Gradients(HasParts):
    """The methods of an Accelerator for gradients."""

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip the gradients' global norm once the window is closed. Called on all ranks.

        Returns:
            The norm before clipping, shape (); None while the window is open.
        """
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return self._parts.prepared.holding(chosen).clip(chosen, norm=max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each gradient element to [-clip_value, clip_value] once the window is closed. Called on all ranks."""
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._parts.prepared.holding(chosen).clip(chosen, value=clip_value)

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
