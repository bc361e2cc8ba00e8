"""Data parallel training: a replica on every rank, gradients averaged by torch's DistributedDataParallel."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.composed.backend import ComposedBackend
from drivetrain_backends.composed.state_layout import StateLayout
from drivetrain_backends.composed.strategy import ModelTransform, StepGuard, Strategy
from drivetrain_backends.composed.transforms import on_one_device
from drivetrain_backends.ddp import compat
from drivetrain_backends.ddp.communication_hooks import applied_hook, check_hook, hook_dtype, register_hook
from drivetrain_backends.ddp.replica import Replica, ReplicatedGradients
from drivetrain_backends.errors import AccumulationError, PairingError, UnreducedGradientError
from drivetrain_backends.gradients.reducer import ONCE, BackwardOptions
from drivetrain_backends.gradients.tracker import GradientGroup
from drivetrain_backends.modules.batch_norm import (
    batch_norms,
    check_batch_norms,
    restore_batch_norms,
    synchronise_batch_norms,
)
from drivetrain_backends.modules.held_dtypes import reduced_in
from drivetrain_backends.modules.model_checks import check_no_renormalising, check_not_lazy
from drivetrain_backends.modules.packed_weights import is_wrapper, parts_of
from drivetrain_backends.modules.replicated_weights import ReplicatedWeights, check_replicas, replicas_of
from drivetrain_backends.protocol import AutoValue
from drivetrain_backends.settings import DDPSettings
from drivetrain_backends.state_dict.dtensor import broadcast_parts
from drivetrain_precision import DtypePolicy
from drivetrain_precision.dtypes.dtype_policy import NAMES
from drivetrain_state import Context


class DDPBackend(ComposedBackend):
    """A backend that replicates each model on every rank; a model without trainable parameters is only moved.

    Raises:
        RuntimeError: The context has no process group.
        PrecisionError: The communication hook and the run's `reduce_dtype` set different dtypes.
    """

    settings_section: ClassVar[str | None] = "ddp"
    settings_type: ClassVar[type[Any] | None] = DDPSettings
    needs_group: ClassVar[bool] = True

    def compose(self) -> Strategy:
        """Return the strategy: a model on its device, in its dtypes, under autocast, and DDP around it.

        Raises:
            ValueError: The mesh has shards, which DDP would hold whole.
        """
        if (size := self.context.ranks("shard").size) > 1:
            raise ValueError(
                f"parallel.shard={size} under backend='ddp', which divides no parameters: say backend='fsdp', or "
                f"data={size} in place of shard"
            )
        settings: DDPSettings = self.settings
        dtypes = self.policy.dtypes
        check_hook(settings, dtypes)
        self._gradients = ReplicatedGradients(self.context, self.scaler, settings, dtypes.reduce)
        self._replicate = Replicate(self.context, dtypes, settings, self._gradients)
        return Strategy(
            transforms=(
                SynchroniseBatchNorms(self.context, is_enabled=settings.sync_batch_norm),
                *on_one_device(self.context, self.policy, self.note_forward),
                self._replicate,
            ),
            gradients=self._gradients,
            layout=StateLayout(self.context),
            guards=(
                FrozenGradientGuard(self._gradients),
                DriftGuard(self.context, self._gradients, every=settings.check_drift_every),
            ),
        )

    def replicas(self) -> ReplicatedWeights | None:
        """Return the weights of all prepared models; see `SupportsReplicas`."""
        return replicas_of(self.context, self._replicate.models)

    def watch_waits(self, on_computed: Callable[[], None] | None) -> None:
        """Call a function before each wait for other ranks in a backward; see `SupportsWaitWatch`."""
        self._gradients.on_computed = on_computed

    def backward_alone(self, loss: Tensor, *, options: BackwardOptions = ONCE) -> None:
        """Add the gradients of a loss and average them, if the program itself steps; see `SupportsManualSteps`."""
        tracker = self._tracker
        if self.scaler is not None:
            raise PairingError(
                "backward() under fp16 without a prepared optimizer: the program's own would step on scaled "
                "gradients. Pass it to prepare() with its model"
            )
        if not self._prepared:
            raise AccumulationError("backward() before prepare(model): no ranks average its gradients")
        if tracker.first_losses.num_left:
            leaves = [(group, self._gradients.leaves(group.models)) for group in tracker.groups]
            tracker.first_losses.follow(loss, leaves, is_stepped=False)
        models = [prepared.unwrap() for prepared in self._prepared]
        self._gradients.backward(loss, models, options=options)
        replicas = self._gradients.replicas
        self._gradients.average([one for one in models if one in replicas and replicas[one].syncs == "on"])


class SynchroniseBatchNorms(ModelTransform):
    """Normalise over the batches of all ranks, if the settings say so."""

    def __init__(self, context: Context, *, is_enabled: bool) -> None:
        self._context, self._is_enabled = context, is_enabled
        self._changed: dict[nn.Module, dict[nn.Module, type[nn.Module]]] = {}  # former classes, by model

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Refuse layers that cannot be synchronised."""
        del optimizers
        for model in models if self._is_enabled else ():
            check_batch_norms(model, self._context.device)

    def apply(self, model: nn.Module) -> nn.Module:
        """Exchange the classes of the layers."""
        if self._is_enabled:
            group = self._context.ranks("counts").process_group
            self._changed[model] = synchronise_batch_norms([model], group)
        return model

    def release(self, model: nn.Module) -> None:
        """Restore the classes of the layers."""
        restore_batch_norms(self._changed.pop(model, {}))


class Replicate(ModelTransform):
    """Wrap a model in DDP, with rank 0's parameters and buffers on every rank.

    `models` are the user's modules that are prepared now, with those that are not trained and so not wrapped.
    """

    def __init__(
        self, context: Context, dtypes: DtypePolicy, settings: DDPSettings, gradients: ReplicatedGradients
    ) -> None:
        self.models: list[nn.Module] = []
        self._context, self._dtypes, self._settings, self._gradients = context, dtypes, settings, gradients
        self._made = WeakSet[Replica]()
        self._returning: dict[nn.Module, Replica] = {}  # wrappers to use again, by user module

    def recall(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Sequence[nn.Module]:
        """Return the module inside each wrapper that `release` left to the user, and use the wrapper again."""
        del optimizers
        self._returning = {m.module: m for m in models if isinstance(m, Replica) and m in self._made}
        return [m.module if isinstance(m, Replica) and m in self._made else m for m in models]

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Refuse models that share a trained parameter, have no shapes yet, or write into parameters in forward."""
        del optimizers
        holders: dict[Tensor, nn.Module] = {}
        for model in (*self.models, *models):
            for name, parameter in model.named_parameters():
                other = holders.setdefault(parameter, model)
                if parameter.requires_grad and other is not model:  # DDP would raise, or average twice
                    raise ValueError(
                        f"{type(other).__name__} and {type(model).__name__} share {name}, whose gradient the ddp "
                        "backend would average once for each: put both into one nn.Module whose forward gives both "
                        "outputs (it may have two optimizers), or freeze what they share"
                    )
        for model in models:
            check_not_lazy(model)
            if self._context.ranks("counts").size > 1:
                check_no_renormalising(
                    model, "each rank scales its own batch's rows: the replicas drift apart"
                )

    def apply(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's parameters and buffers, and wrap the model, or take its wrapper back.

        Called on all ranks.
        """
        replica = self._returning.pop(model, None)
        if replica is not None:
            replica.renew()
            self._gradients.open()
            own = (*model.parameters(), *model.buffers())
            broadcast_parts((part for weight in own for part in parts_of(weight)), self._context)
        elif any(p.requires_grad for p in model.parameters()):
            # Opened before DDP is built, whose broadcast all ranks reach before any can close the group again.
            self._gradients.open()
            replica = self._wrap(model)
        self._gradients.add(model, replica)
        self.models.append(model)
        return model if replica is None else replica

    def release(self, model: nn.Module) -> None:
        """Forget the wrapper, which the user may pass to `prepare` again."""
        self.models.remove(model)
        self._gradients.forget(model)

    def fail(self, error: BaseException) -> None:
        """Forget the wrappers that were to be used again."""
        del error
        self.close()

    def close(self) -> None:
        """Forget the wrappers that a refused `prepare` was given."""
        self._returning = {}

    def _wrap(self, model: nn.Module) -> Replica:
        """Return a new DDP wrapper of a model, configured by the settings."""
        context, settings = self._context, self._settings
        packed = {name: weight for name, weight in model.named_parameters() if is_wrapper(weight)}
        for weight in packed.values():  # which DDP leaves out
            broadcast_parts(parts_of(weight), context)
        buffers: dict[str, Any] = {compat.BUFFERS_ARGUMENT: settings.broadcast_buffers}
        with compat.leaving_out(model, packed):
            replica = Replica(
                model,
                # The backwards of a pipeline's micro-batches come by turns, for which DDP's reducer is not made.
                at_close=settings.reduce == "at_close" or context.ranks("pipeline").size > 1,
                device_ids=None if context.device.type == "cpu" else [context.device],
                process_group=context.ranks("counts").process_group,
                **buffers,
                bucket_cap_mb=settings.bucket_size_mb,
                find_unused_parameters=settings.find_unused_parameters,
                gradient_as_bucket_view=settings.gradient_as_bucket_view,
                static_graph=settings.static_graph,
            )
        register_hook(replica, settings, reduced_in(self._dtypes))
        self._made.add(replica)
        return replica

    def applied(self) -> Mapping[str, object]:
        """Return the values in force, read back from the first DDP wrapper."""
        settings = self._settings
        replica = next(iter(self._gradients.replicas.values()), None)
        if replica is None:
            return {"reduce_dtype": self._dtypes.said().get("reduce_dtype")}
        reduce: object = "at_close" if replica.at_close else "overlap"
        if settings.reduce is None:
            reason = "averaged during backward; gradients that bypass the reducer, when the window closes"
            reduce = AutoValue(value=reduce, reason=reason)
        layers = [layer for model in self.models for _, layer in batch_norms(model)]
        return {
            **compat.applied_arguments(replica),
            "sync_batch_norm": settings.sync_batch_norm
            and all(isinstance(layer, nn.SyncBatchNorm) for layer in layers),
            **applied_hook(replica),
            "reduce": reduce,
            "check_drift_every": settings.check_drift_every,
            "reduce_dtype": self._applied_dtype(replica),
        }

    def _applied_dtype(self, replica: Replica) -> object:
        is_said = "reduce_dtype" in self._dtypes.said()
        dtype = self._gradients.dtype if replica.at_close else hook_dtype(replica)
        if dtype is None or not (is_said or self._dtypes.param is not None):
            return None
        why = "param_dtype='bf16': sums in bf16 would lose small gradients"
        return NAMES[dtype] if is_said else AutoValue(value=NAMES[dtype], reason=why)


class FrozenGradientGuard(StepGuard):
    """Refuse to step on a gradient of a parameter that was frozen when its model was replicated."""

    def __init__(self, gradients: ReplicatedGradients) -> None:
        self._gradients = gradients

    def before_step(self, group: GradientGroup, optimizer: Optimizer) -> None:
        """Look for such gradients, if there are such parameters."""
        del group
        for frozen in self._gradients.frozen.values():
            for parameter in (p for each in optimizer.param_groups if frozen for p in each["params"]):
                if parameter.grad is not None and parameter in frozen:
                    raise UnreducedGradientError(
                        f"{frozen[parameter]} was frozen when prepare() replicated its model, and has a gradient "
                        "now, which ranks do not average: their weights would drift apart. Set requires_grad before "
                        "prepare(); to unfreeze later, free_memory() and prepare() again"
                    )


class DriftGuard(StepGuard):
    """Compare the weights of replicas every `every` steps of a group's first optimizer; for None, at the first."""

    def __init__(self, context: Context, gradients: ReplicatedGradients, *, every: int | None) -> None:
        self._context, self._gradients, self._every = context, gradients, every
        self._num_steps: WeakKeyDictionary[GradientGroup, int] = WeakKeyDictionary()

    def after_step(self, group: GradientGroup, optimizer: Optimizer) -> None:
        """Count the step, and compare if a comparison is due, for which the host waits."""
        number, every, gradients = self._num_steps.get(group, 0) + 1, self._every, self._gradients
        if optimizer is not group.optimizers[0] or (every is None and number > 1):
            return
        is_together = not gradients.is_joined and any(map(gradients.steps_together, group.models))
        if every is not None or is_together:
            self._num_steps[group] = number
        if number % every == 0 if every is not None else is_together:
            check_replicas(self._context, group.models)
