"""A prepared model that every rank holds in full: its steps refuse what would make the replicas drift apart."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.optim import Optimizer

from drivetrain_backends.gradients.tracker import GradientTracker
from drivetrain_backends.modules.parameter_guard import KnownParameters
from drivetrain_backends.modules.replicated_weights import check_replicas
from drivetrain_backends.optim.optimizer import StepResult
from drivetrain_backends.torch.compat import has_learnt_static_graph
from drivetrain_backends.torch.ddp_gradients import ReplicatedGradients
from drivetrain_backends.torch.ddp_replica import Replica
from drivetrain_backends.torch.prepared import TorchPrepared
from drivetrain_state import Context


class ReplicatedPrepared(TorchPrepared):
    """A replica with its optimizers, or a model that is not trained.

    Weights are compared across ranks every `check_drift_every` steps of the group's first optimizer; for None at the
    first step, and at saves.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        context: Context,
        tracker: GradientTracker,
        gradients: ReplicatedGradients,
        check_drift_every: int | None,
    ) -> None:
        super().__init__(model, context=context, tracker=tracker)
        self._replica = model if isinstance(model, Replica) else None
        self.steps_together = self._replica is not None
        self._gradients = gradients
        self._check_drift_every = check_drift_every
        self._num_steps = 0

    def known_parameters(self) -> KnownParameters:
        """Return the record that the replica keeps."""
        return self.model.known if isinstance(self.model, Replica) else super().known_parameters()

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local in the block; see `Prepared.no_sync`."""
        replica = self._replica
        # DDP learns a static graph from its first backward, which must therefore reduce (otherwise an internal
        # assertion fails, torch 2.9 to 2.15). Reducing early changes nothing: the mean of equal means is the mean.
        if replica is None or (replica.static_graph and not has_learnt_static_graph(replica)):
            return nullcontext()
        return replica.no_sync()

    @contextmanager
    def trained_alone(self) -> Generator[None]:
        """Step on this rank's own gradients in the block; see `SupportsLocalSteps`. Called on all ranks.

        Raises:
            RuntimeError: Weights are compared at steps, or DDP has to learn a static graph from a backward that
                reduces.
        """
        replica = self._replica
        if replica is None:
            yield
            return
        if self._check_drift_every is not None:
            raise RuntimeError(
                "replicas that are trained alone drift apart: leave --ddp-check-drift-every out"
            )
        if replica.static_graph and not has_learnt_static_graph(replica):
            raise RuntimeError(
                "--ddp-static-graph: train one step together first, from which DDP learns the graph"
            )
        replica.is_alone, self.steps_together = True, False
        try:
            with replica.no_sync():
                yield
        finally:
            replica.is_alone, self.steps_together = False, True
            replica.is_unreduced = (
                False  # what is left was stepped on, and would be averaged with the next step's
            )

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one optimizer if the window is closed. Called on all ranks.

        Raises:
            UnreducedGradientError: A parameter that was frozen when its model was prepared has a gradient.
            DriftedReplicasError: The weights differ across ranks at a step that compares them.
        """
        if self._gradients.unreduced and self._window.closing:
            self._gradients.check_unreduced(optimizer)
        result = super().step(optimizer)
        if result.stepped and optimizer is self.group.optimizers[0]:
            self._num_steps += 1
            if self._compares_now:
                check_replicas(self._context, self.group.models)
        return result

    @property
    def _compares_now(self) -> bool:
        """True at a step that compares weights across ranks, for which the host waits: the first, unless said."""
        number, every = self._num_steps, self._check_drift_every
        return number % every == 0 if every is not None else number == 1 and not self._is_alone
