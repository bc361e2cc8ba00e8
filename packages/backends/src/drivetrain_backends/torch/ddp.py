"""Data parallel training: a replica on every rank, gradients averaged by torch's DistributedDataParallel."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain_backends.errors import AccumulationError, PairingError
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.gradients.reducer import ONCE, BackwardOptions
from drivetrain_backends.gradients.tracker import GradientTracker
from drivetrain_backends.modules.batch_norm import (
    batch_norms,
    check_batch_norms,
    restore_batch_norms,
    synchronise_batch_norms,
)
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.held_dtypes import reduced_in
from drivetrain_backends.modules.model_checks import check_new, check_no_renormalising, check_not_lazy
from drivetrain_backends.modules.packed_weights import is_wrapper, parts_of
from drivetrain_backends.modules.parameter_guard import KnownParameters
from drivetrain_backends.modules.replicated_weights import ReplicatedWeights, check_replicas, replicas_of
from drivetrain_backends.optim.optimizer import StepResult
from drivetrain_backends.optim.scheduler import Scheduler
from drivetrain_backends.protocol import AutoValue
from drivetrain_backends.settings import DDPSettings
from drivetrain_backends.state_dict.dtensor import broadcast_parts
from drivetrain_backends.torch import compat
from drivetrain_backends.torch.backend import TorchBackend, loss_scaler
from drivetrain_backends.torch.compat import has_learnt_static_graph
from drivetrain_backends.torch.ddp_gradients import ReplicatedGradients
from drivetrain_backends.torch.ddp_replica import Replica, applied_hook, check_hook, hook_dtype, register_hook
from drivetrain_backends.torch.prepared import TorchPrepared
from drivetrain_precision import Policy
from drivetrain_precision.dtypes.dtype_policy import NAMES
from drivetrain_state import Context


class DDPBackend(TorchBackend):
    """A backend that replicates each model on every rank; a model without trainable parameters is only moved.

    Raises:
        RuntimeError: The context has no process group.
        PrecisionError: The communication hook and the run's `reduce_dtype` set different dtypes.
    """

    settings_section: ClassVar[str | None] = "ddp"
    settings_type: ClassVar[type[Any] | None] = DDPSettings
    needs_group: ClassVar[bool] = True

    def __init__(
        self, context: Context, policy: Policy, *, window: AccumulationWindow, settings: Any = None
    ) -> None:
        own: DDPSettings = self.settings_or_defaults(settings)
        self._gradients = ReplicatedGradients(
            context,
            loss_scaler(context, policy),
            bucket_bytes=own.bucket_size_mb * 2**20,
            dtype=policy.dtypes.reduce,
        )
        check_hook(own, policy.dtypes)
        super().__init__(context, policy, window=window, settings=own, reducer=self._gradients)
        self.settings: DDPSettings = own
        self._batch_norms: dict[nn.Module, type[nn.Module]] = {}  # former classes of synchronised layers
        self._made = WeakSet[Replica]()
        # By user module, of the models that are being prepared.
        self._returning: dict[nn.Module, Replica] = {}

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler]
    ) -> tuple[TorchPrepared, ...]:
        """Prepare models with their optimizers and schedulers; see `Backend.prepare`. Called on all ranks.

        In place of the user's module, a wrapper that `close` of this backend released may be given and is used again.

        Raises:
            ValueError: A model is already prepared; two models share a trainable parameter; or `sync_batch_norm` is
                on, and a layer cannot be synchronised.
        """
        given, known = models, self._made
        models = [each.module if isinstance(each, Replica) and each in known else each for each in given]
        check_new(models)
        _check_shared([*(p.unwrap() for p in self._prepared), *models])
        changed: dict[nn.Module, type[nn.Module]] = {}
        if self.settings.sync_batch_norm:
            for model in models:
                check_batch_norms(model, self.context.device)
            changed = synchronise_batch_norms(models, self.context.ranks("counts").process_group)
        pairs = zip(models, given, strict=True)
        self._returning = {model: each for model, each in pairs if isinstance(each, Replica)}
        try:
            prepared = super().prepare(models, optimizers, schedulers)
        except BaseException:
            restore_batch_norms(changed)
            raise
        finally:
            self._returning = {}
        self._batch_norms |= changed
        return prepared

    def check_models(self, models: Sequence[nn.Module], trained_by: Mapping[nn.Module, Optimizer]) -> None:
        """Refuse models whose parameters have no shape yet, or whose forwards write into parameters."""
        super().check_models(models, trained_by)
        for model in models:
            check_not_lazy(model)
            if self.context.ranks("counts").size > 1:
                check_no_renormalising(
                    model, "each rank scales its own batch's rows: the replicas drift apart"
                )

    def replicas(self) -> ReplicatedWeights | None:
        """Return the weights of all prepared models; see `SupportsReplicas`."""
        return replicas_of(self.context, [prepared.unwrap() for prepared in self._prepared])

    def watch_waits(self, on_computed: Callable[[], None] | None) -> None:
        """Call a function before each wait for other ranks in a backward; see `SupportsWaitWatch`."""
        self._gradients.on_computed = on_computed

    def make_prepared(self, model: nn.Module) -> TorchPrepared:
        """Return the `Prepared` of a replica, which checks for drift if the settings ask for it."""
        return ReplicatedPrepared(
            model,
            context=self.context,
            tracker=self._tracker,
            gradients=self._gradients,
            check_drift_every=self.settings.check_drift_every,
        )

    def undo_prepare(self, placed: Sequence[TorchPrepared], error: BaseException) -> None:
        """Forget the replicas too; see `TorchBackend.undo_prepare`."""
        super().undo_prepare(placed, error)
        for prepared in placed:
            self._gradients.forget(prepared.unwrap())

    def close(self) -> None:
        """Restore the original classes of all models and layers, and forget all models."""
        super().close()
        self._gradients.close()
        restore_batch_norms(self._batch_norms)
        self._batch_norms = {}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Replicate `model` by broadcasting rank 0's parameters and buffers. Called on all ranks."""
        if model in self._returning:
            return self._take_back(self._returning[model])
        frozen = {
            parameter: name for name, parameter in model.named_parameters() if not parameter.requires_grad
        }
        at_close = self.settings.reduce == "at_close"
        if not (trained := any(p.requires_grad for p in model.parameters())) or not at_close:
            self._gradients.unreduced |= frozen
        if not trained:
            return model
        # Before the replica, whose broadcast ends when all ranks are connected: a rank that closed the group earlier
        # would break the connections that another is still making.
        self._gradients.open()
        packed = {name: weight for weight, name in frozen.items() if is_wrapper(weight)}
        for weight in packed.values():
            broadcast_parts(parts_of(weight), self.context)
        # DDP broadcasts from the first of its own ranks, which are not all.
        if self.context.ranks("counts").size < self.context.topology.world_size:
            broadcast_parts(
                (w for w in (*model.parameters(), *model.buffers()) if not is_wrapper(w)), self.context
            )
        with compat.leaving_out(model, packed):
            replica = self._replicate(model, at_close=at_close)
        self._made.add(replica)
        self._gradients.replicas[model] = replica
        return replica

    def _replicate(self, model: nn.Module, *, at_close: bool) -> Replica:
        """Return a new DDP wrapper of a model, configured by the settings."""
        settings, device = self.settings, self.context.device
        buffers: dict[str, Any] = {compat.BUFFERS_ARGUMENT: settings.broadcast_buffers}
        replica = Replica(
            model,
            at_close=at_close,
            device_ids=None if device.type == "cpu" else [device],
            process_group=self.context.ranks("counts").process_group,
            **buffers,
            bucket_cap_mb=settings.bucket_size_mb,
            find_unused_parameters=settings.find_unused_parameters,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        register_hook(replica, settings, reduced_in(self.policy.dtypes))
        return replica

    def _take_back(self, replica: Replica) -> Replica:
        """Use a wrapper again that `close` released; the reducer is unchanged. Called on all ranks."""
        self._gradients.open()
        if not replica.at_close:
            self._gradients.unreduced |= replica.left_out()
        replica.is_armed = replica.is_unreduced = False  # what earlier backwards left is not used
        self._gradients.replicas[replica.module] = replica
        return replica

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
        self._gradients.average([one for one in models if one in replicas and not replicas[one].is_held])

    @contextmanager
    def join(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Let ranks run out of batches at different steps; a finished rank joins the all-reduces of the others.

        Gradients are the mean over the ranks that still have batches.

        Args:
            models: The prepared models that are trained in the block.

        Raises:
            RuntimeError: The settings average gradients when the window closes, or compare weights; a finished rank
                cannot take part in either.
        """
        settings = self.settings
        if settings.reduce == "at_close" or settings.check_drift_every is not None:
            flag = "reduce at_close" if settings.reduce == "at_close" else "check-drift-every"
            raise RuntimeError(
                f"join_uneven_inputs with --ddp-{flag}: a rank without batches answers DDP's reducer alone. Leave "
                "one of the two out, or prepare the loader, which gives every rank equally many batches"
            )
        found = (unwrap_compiled(model) for model in models)
        replicas: list[Joinable] = [model for model in found if isinstance(model, DistributedDataParallel)]
        self._gradients.is_joined = True
        try:
            with Join(replicas, divide_by_initial_world_size=False):
                yield
        finally:
            self._gradients.is_joined = False

    def applied(self) -> Mapping[str, object]:
        """Return the values in force, read back from the DDP wrappers."""
        settings = self.settings
        replicas = [p.model for p in self._prepared if isinstance(p.model, Replica)]
        layers = [layer for prepared in self._prepared for _, layer in batch_norms(prepared.unwrap())]
        found = dict(super().applied())
        for replica in replicas[:1]:
            reason = (
                "gradients are averaged while backward runs; what comes around that, when the window closes"
            )
            by_default = AutoValue(value="overlap", reason=reason)
            is_synchronised = all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
            found |= {
                **compat.applied_arguments(replica),
                "sync_batch_norm": settings.sync_batch_norm and is_synchronised,
                **applied_hook(replica),
                "reduce": by_default
                if settings.reduce is None
                else "at_close"
                if replica.at_close
                else "overlap",
                "check_drift_every": settings.check_drift_every,
            }
        return found

    def reduce_dtype(self) -> object:
        """Return the dtype in which ranks add up gradients; see `TorchBackend`."""
        replicas = [p.model for p in self._prepared if isinstance(p.model, Replica)]
        dtypes = self.policy.dtypes
        said = dtypes.said().get("reduce_dtype")
        if not replicas or (said is None and dtypes.param is None):
            return said
        applied = self._gradients.dtype if replicas[0].at_close else hook_dtype(replicas[0])
        name = None if applied is None else NAMES[applied]
        if said is not None or name is None:
            return name
        return AutoValue(value=name, reason="param_dtype='bf16': sums in bf16 would lose small gradients")


def _check_shared(models: Sequence[nn.Module]) -> None:
    """Refuse models that share a trained parameter: DDP would raise in backward or average its gradient twice."""
    holders: dict[Tensor, nn.Module] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            other = holders.setdefault(parameter, model)
            if parameter.requires_grad and other is not model:
                raise ValueError(
                    f"{type(other).__name__} and {type(model).__name__} share {name}, whose gradient the ddp backend "
                    "would average once for each: put both into one nn.Module whose forward gives both outputs (it "
                    "may have two optimizers), or freeze what they share"
                )


class ReplicatedPrepared(TorchPrepared):
    """A replica with its optimizers, or a model that is not trained.

    Weights are compared across ranks every `check_drift_every` steps of the group's first optimizer. For None, they
    are compared at the first step and at saves.
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
        """Return the record of the model's parameters; a replica keeps this record itself."""
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
        """Step on this rank's own gradients in the block; see `SupportsLocalSteps`. Called on all ranks."""
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
            # What is left was stepped on, and would be averaged with the next step's.
            replica.is_unreduced = False

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one optimizer if the window is closed; compare weights if a check is due. Called on all ranks."""
        if self._gradients.unreduced and self._window.closing:
            self._gradients.check_unreduced(optimizer)
        result = super().step(optimizer)
        if result.stepped and optimizer is self.group.optimizers[0]:
            self._num_steps += 1
            number, every = self._num_steps, self._check_drift_every
            # The host waits for it: only at the first step, unless the settings say how often.
            if number % every == 0 if every is not None else number == 1 and not self._is_alone:
                check_replicas(self._context, self.group.models)
        return result
