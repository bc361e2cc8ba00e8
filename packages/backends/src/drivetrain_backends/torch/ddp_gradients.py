"""Gradients of replicas: DDP's reducer averages during backward; the rest is averaged when the window closes."""

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from drivetrain_backends.errors import AccumulationError, UnreducedGradientError
from drivetrain_backends.gradients.averaging import average
from drivetrain_backends.gradients.reducer import (
    ONCE,
    BackwardOptions,
    ParameterGradients,
    trainable_parameters,
)
from drivetrain_backends.torch.compat import call_after_backward, has_rebuilt_buckets
from drivetrain_backends.torch.ddp_replica import Replica
from drivetrain_precision import LossScaler
from drivetrain_state import Context, ProgressMark

logger = logging.getLogger(__name__)


class ReplicatedGradients(ParameterGradients):
    """The gradients that DDP leaves in `.grad`: averaged over all ranks as far as its reducer has seen them.

    A loss from another method of the model, or the second of two backwards, bypasses the reducer. The mean over ranks
    of `mean(a) + b` is `mean(a) + mean(b)`; all gradients of a replica are therefore averaged once more when its
    window closes, if one of its backwards bypassed the reducer.
    """

    def __init__(
        self,
        context: Context,
        scaler: LossScaler | None,
        *,
        bucket_bytes: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(scaler)
        self.replicas: dict[nn.Module, Replica] = {}  # the DDP wrappers by user module
        # The parameters whose gradients are not averaged over ranks, with their names: those frozen when their model
        # was replicated.
        self.unreduced: dict[Tensor, str] = {}
        self.averages = context.ranks("counts").size > 1
        # A function called in each backward that ranks wait for, before this rank waits; None for none.
        self.on_computed: Callable[[], None] | None = None
        self._context = context
        self._bucket_bytes = bucket_bytes
        # The dtype in which gradients that bypassed the reducer are summed; None for fp32 or wider.
        self.dtype = dtype
        self._group: ProcessGroup | None = None
        self._rebuilt: set[Replica] = set()
        self._has_told = False

    def backward(self, loss: Tensor, models: Sequence[nn.Module], *, options: BackwardOptions = ONCE) -> None:
        """Run torch's backward, and record which replicas it reached; see `GradientReducer.backward`."""
        if options.create_graph and self.replicas:
            raise AccumulationError(
                f"backward({options.said}): DDP averages gradients in place, which a graph of their own forbids; "
                "take them by torch.autograd.grad(loss, tensors, create_graph=True), add what follows from them to "
                "the loss, and call backward(loss) once"
            )
        before = [(replica, replica.gradient_versions()) for replica in self.replicas.values()]
        on_computed = self.on_computed
        if on_computed is not None and any(replica.is_armed for replica in self.replicas.values()):
            # The hook is the first thing that runs in the backward, so that the call comes before the reducer's.
            def call_once_computed(_: Tensor) -> None:
                call_after_backward(on_computed)

            handle = loss.register_hook(call_once_computed)
            try:
                super().backward(loss, models, options=options)
            finally:
                handle.remove()
        else:
            try:
                super().backward(loss, models, options=options)
            except RuntimeError as error:
                for replica in self.replicas.values():
                    replica.refuse_converted(error)
                raise
        for replica, versions in before:
            replica.record_backward(versions)

    def finalize(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Average what bypassed the reducer, then unscale and correct in one pass; see `GradientReducer.finalize`."""
        if self.averages:
            self._finish_replicas([self.replicas[model] for model in models if model in self.replicas])
        return super().finalize(models, factor)

    def have_moved(self, models: Sequence[nn.Module]) -> bool:
        """Return whether DDP has rebuilt its buckets since the last call, which moves the gradients."""
        rebuilt = {
            replica
            for model in models
            if (replica := self.replicas.get(model)) is not None and has_rebuilt_buckets(replica)
        }
        new = rebuilt - self._rebuilt
        self._rebuilt |= new
        return bool(new)

    def mark_edited(self, models: Sequence[nn.Module]) -> None:
        """Record that other code changed gradients, so that they are averaged when the window closes."""
        for model in models:
            if model in self.replicas:
                self.replicas[model].is_unreduced = True

    def are_averaged(self, models: Sequence[nn.Module]) -> bool:
        """Return whether the reducer averaged all that backwards left; see `ParameterGradients.are_averaged`."""
        return not any(
            self._awaits_average(self.replicas[model]) for model in models if model in self.replicas
        )

    def average(self, models: Sequence[nn.Module]) -> None:
        """Average the gradients that other code changed. Called on all ranks."""
        replicas = [self.replicas[model] for model in models if model in self.replicas]
        if not replicas or (self.is_joined and all(p.grad is None for r in replicas for p in r.parameters())):
            return
        self._finish_replicas(replicas)

    def check_unreduced(self, optimizer: Optimizer) -> None:
        """Refuse to step on gradients that are not averaged over ranks."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self.unreduced:
                    raise UnreducedGradientError(
                        f"{self.unreduced[parameter]} was frozen when prepare() replicated its model, and has a "
                        "gradient now, which ranks do not average: their weights would drift apart. Set "
                        "requires_grad before prepare(); to unfreeze later, free_memory() and prepare() again"
                    )

    def forget(self, model: nn.Module) -> None:
        """Forget the replica of a model that could not be prepared."""
        self.replicas.pop(model, None)
        for parameter in model.parameters():
            self.unreduced.pop(parameter, None)

    def close(self) -> None:
        """Forget the replicas, and destroy the process group for averaging. Called on all ranks."""
        self.replicas.clear()
        self.unreduced.clear()
        self._rebuilt.clear()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def open(self) -> None:
        """Create a group for averaging once, since the reducer's would match its all-reduces. Called on all ranks."""
        if self._group is None and self.averages:
            self._group = self._context.ranks("counts").new_group()

    @staticmethod
    def _awaits_average(replica: Replica) -> bool:
        return not replica.is_alone and (replica.at_close or replica.is_unreduced)

    def _finish_replicas(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            replica.check_reduced()
        chosen = [replica for replica in replicas if self._awaits_average(replica)]
        if parameters := trainable_parameters([replica.module for replica in chosen]):
            self._average(parameters, chosen)
        for replica in chosen:
            replica.is_unreduced = False

    def _average(self, parameters: Sequence[nn.Parameter], replicas: Sequence[Replica]) -> None:
        names = " and ".join(type(replica.module).__name__ for replica in replicas)
        if self.is_joined:
            raise UnreducedGradientError(
                f"gradients of {names} came around DDP's reducer inside join_uneven_inputs, where a rank without "
                "batches cannot average them: let each loss come from model(batch), one backward after each forward, "
                "or prepare the loader, which gives every rank equally many batches"
            )
        if not self._has_told and not all(replica.at_close for replica in replicas):
            self._has_told = True
            logger.info(
                "gradients of %s came around DDP's reducer (a loss of a method of the model, a second backward after "
                "one forward, or an edit) and are averaged when their window closes; where that is so in every "
                "step, --ddp-reduce at_close spares the reducer's own averaging",
                names,
            )
        self._context.progress.mark(ProgressMark.AVERAGING)
        average(
            parameters,
            self._context.device,
            group=self._group,
            bucket_bytes=self._bucket_bytes,
            dtype=self.dtype,
        )
        self._context.progress.mark(ProgressMark.AVERAGING_DONE)
