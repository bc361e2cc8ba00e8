"""The protocols of a training backend and of the models it prepares.

Call order, on all ranks unless said otherwise:

1. `Backend(context, policy, window=..., settings=...)`, once for an Accelerator.
2. `Backend.building()` around the construction of models, where a user asks for it.
3. `Backend.prepare(models, optimizers, schedulers)`, any number of times.
4. For each micro-batch: `window.begin(...)`, forward, then `Prepared.backward` (or `Backend.backward` for a loss of
   several models), inside `Prepared.no_sync()` of the models unless the micro-batch closes the window.
5. When the window closes: `Prepared.clip` (optional), `Prepared.step`, `Prepared.zero_grad`.
6. `Prepared.state_dict` / `load_state_dict` between windows.
7. `Backend.close()`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.gradients.reducer import ONCE, BackwardOptions
from drivetrain_backends.modules.replicated_weights import ReplicatedWeights
from drivetrain_backends.optim.optimizer import PreparedOptimizer, StepResult
from drivetrain_backends.optim.scheduler import PreparedScheduler, Scheduler
from drivetrain_precision import Policy
from drivetrain_state import Context

State = dict[str, Any]  # nested plain values and tensors, as stored in checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoValue:
    """A value that the backend chose because the settings left it open, for the effective plan.

    Attributes:
        value: The value that is applied.
        reason: The reason for it, in a few words.
    """

    value: object
    reason: str


@runtime_checkable
class Prepared(Protocol):
    """A model with its optimizers and schedulers, as a backend trains them."""

    model: nn.Module
    optimizers: list[PreparedOptimizer]
    schedulers: list[PreparedScheduler]

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Add the gradients of `loss`, of shape ().

        Without `count` the loss is a mean, and the gradient of the window is the mean of the micro-batch gradients.
        With `count` the loss is a sum over `count` items (such as tokens) of this rank, and the gradient of the
        window is that of the mean over all items of all ranks and micro-batches.

        Raises:
            PairingError: The loss trains an unprepared model or one without a prepared optimizer, where detectable.
        """
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local in the block. Entered for every micro-batch that does not close the window."""
        ...

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one of the model's optimizers; do nothing while the window is open."""
        ...

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the gradients of one optimizer; keep those of an open window."""
        ...

    def clip(
        self,
        parameters: Iterable[Tensor] | None = None,
        *,
        norm: float | None = None,
        norm_type: float = 2.0,
        value: float | None = None,
    ) -> Tensor | None:
        """Clip by the global norm and return it, of shape (); or clip by value. Return None in an open window."""
        ...

    def unwrap(self) -> nn.Module:
        """Return the module as the user built it, with the trained parameters."""
        ...

    def gathered(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Gather the full parameters of `unwrap()` on every rank in the block. Called on all ranks.

        Args:
            write: Whether all ranks keep what rank 0 writes into the parameters; otherwise the effect of a write is
                undefined.
        """
        ...

    def state_dict(self) -> State:
        """Return model, optimizers and schedulers by canonical name, the same on every rank. Called on all ranks.

        A sharded tensor is a value with a `full_tensor()` method, like torch's DTensor, which returns the full tensor
        when called on all ranks in the same order.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, full or sharded, saved with any number of ranks. Called on all ranks."""
        ...


@runtime_checkable
class SupportsReplicas(Protocol):
    """A backend with full weights on every rank: a checkpoint saves each weight from one rank."""

    def replicas(self) -> ReplicatedWeights | None:
        """Return this rank's weights for a comparison across ranks; None if ranks share no equal weights.

        Called on all ranks when a save begins.
        """
        ...


@runtime_checkable
class SupportsLocalSteps(Protocol):
    """A prepared model whose replicas can train apart from each other, each on its own gradients."""

    def trained_alone(self) -> AbstractContextManager[None]:
        """Step on this replica's own gradients in the block. Called on all ranks.

        The replicas' weights drift apart: the caller makes them equal again, at the latest before the block ends.

        Raises:
            RuntimeError: A setting of the backend does not allow steps without averaging.
        """
        ...


@runtime_checkable
class SupportsWeights(Protocol):
    """A prepared model whose weights can be read and exchanged apart from its optimizers."""

    def weights(self) -> State:
        """Return the model's state, as `state_dict` has it: of a divided tensor, this rank's part.

        Called on all ranks.
        """
        ...

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load a result of `weights`, whose tensors may have other elements. Called on all ranks."""
        ...


@runtime_checkable
class SupportsPieces(Protocol):
    """A prepared model that trains a batch in micro-batches of its own, as a pipeline does; it has no `backward`."""

    def train_pieces(self, batch: Any, loss: Callable[[Any, Any], Any], model: Any) -> Tensor:
        """Add the gradients of a batch, and return its loss, of shape (). Called on all ranks.

        A mean is that of the micro-batches, by their samples; a sum with a count is the sum.

        Args:
            batch: The batch, cut along the first dimension of its tensors.
            loss: The function of the model and a micro-batch, as `train_step` takes it.
            model: The first argument of `loss`.
        """
        ...


@runtime_checkable
class SupportsWaitWatch(Protocol):
    """A backend whose backwards end with a wait for the other ranks, and which knows when the wait begins."""

    def watch_waits(self, on_computed: Callable[[], None] | None) -> None:
        """Call a function in each backward that ends with a wait for other ranks, just before the wait.

        From the call to the end of the backward, a rank waits for communication that its computing did not hide. On
        an accelerator, the moment is on the current stream: the function may record an event on that stream. It must
        not wait. It may run in a thread of autograd, while the caller of backward waits.

        Args:
            on_computed: The function; None stops the calls.
        """
        ...


@runtime_checkable
class SupportsManualSteps(Protocol):
    """A backend that leaves averaged gradients in `.grad`, so that a program may step by itself."""

    def backward_alone(self, loss: Tensor, *, options: BackwardOptions = ONCE) -> None:
        """Add the gradients of a loss, and average them over ranks except inside `Prepared.no_sync()`.

        No window counts the loss: no optimizer is prepared, and the program's optimizer steps. Called on all ranks.

        Raises:
            PairingError: The gradients are scaled, or the loss trains no prepared model.
            AccumulationError: No model is prepared, or the options cannot be honoured.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """A way to train: on one device, replicated, sharded, or through an engine.

    Attributes:
        settings_section: The name of this backend's configuration section; None if it has no settings.
        settings_type: The frozen dataclass of that section; None if there is none.
        needs_group: Whether the backend needs a process group even in a single process.
    """

    settings_section: ClassVar[str | None]
    settings_type: ClassVar[type[Any] | None]
    needs_group: ClassVar[bool]
    window: AccumulationWindow

    def __init__(
        self, context: Context, policy: Policy, *, window: AccumulationWindow, settings: Any = None
    ) -> None: ...

    def building(self) -> AbstractContextManager[None]:
        """Construct models in the block as the backend needs them (on its device, on meta, sharded)."""
        ...

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler]
    ) -> tuple[Prepared, ...]:
        """Prepare models with their optimizers and schedulers; an optimizer may come in a later call than its model.

        Returns:
            Every `Prepared` that is new or has gained an optimizer or scheduler.

        Raises:
            PairingError: An optimizer or scheduler belongs to no model prepared in this call or before.
        """
        ...

    def backward(
        self, loss: Tensor, *, count: Tensor | float | None = None, options: BackwardOptions = ONCE
    ) -> None:
        """Add the gradients of a loss whose model the caller does not name.

        With one trained model, this is `Prepared.backward`. With several models, the model is unknown if the backend
        owns backward or the loss has a count.

        Raises:
            AccumulationError: The model is unknown, and the message asks for it; or no model is prepared; or the
                backend cannot do what `options` ask.
        """
        ...

    def backward_of(
        self,
        models: Sequence[Prepared],
        loss: Tensor,
        *,
        count: Tensor | float | None = None,
        options: BackwardOptions = ONCE,
    ) -> None:
        """Add the gradients of a loss that trains several models, each with its own optimizer.

        Raises:
            AccumulationError: The backend does not support this; the message says what to do instead.
        """
        ...

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """Let ranks run out of batches at different steps in the block.

        Raises:
            RuntimeError: The backend does not support this; the message says what to do instead.
        """
        ...

    def applied(self) -> Mapping[str, object]:
        """Return the values in force, read back from live objects; `AutoValue` for values that were left open."""
        ...

    def state_dict(self) -> State:
        """Return the run's own state, without models: the loss scale and the window's reference count."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`."""
        ...

    def close(self) -> None:
        """Release everything the backend holds. Called on all ranks, once; further calls do nothing."""
        ...
