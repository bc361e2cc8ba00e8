"""The two protocols of a training backend.

Call order, on all ranks unless said otherwise:

1. `Backend(context, policy, window=..., settings=...)`, once for an Accelerator.
2. `Backend.building()` around the construction of models, where a user asks for it.
3. `Backend.prepare(models, optimizers, schedulers)`, any number of times.
4. For each micro-batch: `window.begin(...)`, then inside `Prepared.no_sync()` of the models, unless the window
   closes: forward, `Prepared.backward` (or `Backend.backward`, where a loss flows through several models).
5. When the window closes: `Prepared.clip` (optional), `Prepared.step`, `Prepared.zero_grad`.
6. `Prepared.state_dict` / `load_state_dict` between windows.
7. `Backend.close()`.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.optim.optimizer import PreparedOptimizer, StepResult
from drivetrain_backends.optim.scheduler import PreparedScheduler, Scheduler
from drivetrain_precision import Policy
from drivetrain_state import Context

State = dict[str, Any]  # nested plain values and tensors, as checkpoints take them


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An applied value that was left to the backend, for the effective plan.

    Attributes:
        value: What is applied.
        reason: Why, in a few words.
    """

    value: object
    reason: str


@runtime_checkable
class Prepared(Protocol):
    """One model with its optimizers and schedulers, as a backend trains them."""

    model: nn.Module
    optimizers: list[PreparedOptimizer]
    schedulers: list[PreparedScheduler]

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Add the gradients of `loss`, of shape ().

        Without `count` the loss is a mean, and the window's gradient is the mean of its means. With `count` the
        loss is a sum over `count` items (tokens, say) of this rank, and the window's gradient is that of the mean
        over all items of all ranks and micro-batches.

        Raises:
            PairingError: The loss trains what was not prepared, or has no prepared optimizer, as far as that is seen.
        """
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients stay on their rank; entered for every micro-batch that does not close the window."""
        ...

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one of the model's optimizers; nothing happens while the window is open."""
        ...

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear the gradients of one optimizer; those of an open window stay."""
        ...

    def clip(
        self,
        parameters: Iterable[Tensor] | None = None,
        *,
        norm: float | None = None,
        norm_type: float = 2.0,
        value: float | None = None,
    ) -> Tensor | None:
        """Clip by the global norm (and return it, of shape ()) or by value; None while the window is open."""
        ...

    def unwrap(self) -> nn.Module:
        """The module as the user built it, with the trained parameters."""
        ...

    def gathered(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Inside, the parameters of `unwrap()` are whole on every rank. Called on all ranks.

        Args:
            write: Whether what rank 0 writes into them is kept, on all ranks; else changes are undefined.
        """
        ...

    def state_dict(self) -> State:
        """Model, optimizers and schedulers under canonical names, the same on every rank. Called on all ranks.

        A tensor of which each rank holds a part is a value with `full_tensor()`, as torch's DTensor is: called on all
        ranks, in the same order, it gives the whole.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, its tensors whole or not, at any number of ranks. Called on all ranks."""
        ...


@runtime_checkable
class ReplicatesWeights(Protocol):
    """A backend that holds whole weights on every rank, of which a checkpoint takes one rank's."""

    def check_replicas(self) -> None:
        """Refuse to go on where ranks hold other weights. Called on all ranks, before a save.

        Raises:
            DriftedReplicasError: Ranks hold other weights.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """A way to train: on one device, replicated, sharded, or through an engine.

    Attributes:
        settings_section: The name of the configuration section of this backend, None if it has no settings.
        settings_type: The frozen dataclass of that section.
        needs_group: Whether it needs a process group in one process too.
    """

    settings_section: ClassVar[str | None]
    settings_type: ClassVar[type[Any] | None]
    needs_group: ClassVar[bool]
    window: AccumulationWindow

    def __init__(
        self, context: Context, policy: Policy, *, window: AccumulationWindow, settings: Any = None
    ) -> None: ...

    def building(self) -> AbstractContextManager[None]:
        """Inside, a model is constructed as the backend wants it (on its device, on meta, sharded)."""
        ...

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler]
    ) -> tuple[Prepared, ...]:
        """Prepare models with what trains them; an optimizer may come in a later call than its model.

        Returns:
            Every `Prepared` that is new or has gained an optimizer or scheduler.

        Raises:
            PairingError: An optimizer or scheduler belongs to no model prepared now or before.
        """
        ...

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Add the gradients of a loss of which the caller has not said whose it is.

        With one trained model that is `Prepared.backward`. With several, a backend that owns backward, or a loss
        with a count, cannot know which it belongs to.

        Raises:
            AccumulationError: It cannot be known; the message asks for the model. Or none is prepared.
        """
        ...

    def backward_of(
        self, models: Sequence[Prepared], loss: Tensor, *, count: Tensor | float | None = None
    ) -> None:
        """Add the gradients of a loss that trains several models, each with an optimizer of its own.

        Raises:
            AccumulationError: The backend cannot; the message says what to do instead.
        """
        ...

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """Let ranks run out of batches at different steps inside.

        Raises:
            RuntimeError: The backend cannot; the message says what to do instead.
        """
        ...

    def applied(self) -> Mapping[str, object]:
        """What is in force, read back from live objects for the effective plan; `Chosen` where it was left open."""
        ...

    def state_dict(self) -> State:
        """What belongs to the run, not to a model: the loss scale, the window's reference count."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        ...

    def close(self) -> None:
        """Let go of what the backend holds. Called on all ranks, once; further calls do nothing."""
        ...
