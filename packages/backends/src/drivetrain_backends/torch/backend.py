"""The common part of all backends: pairing models with optimizers, and the state of their gradients.

Subclasses decide how a model is wrapped, and which object reduces its gradients.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.errors import AccumulationError, PairingError
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.gradients.reducer import ONCE, BackwardOptions, GradientReducer, ParameterGradients
from drivetrain_backends.gradients.tracker import GradientGroup, GradientTracker, group_models
from drivetrain_backends.modules.autocast_forward import PreparedForward, prepare_forward, restore_forward
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.held_dtypes import (
    Islands,
    check_updates,
    hold_model,
    plan_islands,
    updates_of,
)
from drivetrain_backends.modules.model_checks import check_new, check_values
from drivetrain_backends.optim.host_optimizers import check_steps_parameters
from drivetrain_backends.optim.parameter_matching import owners
from drivetrain_backends.optim.scheduler import PreparedScheduler, Scheduler
from drivetrain_backends.protocol import AutoValue
from drivetrain_backends.torch.prepared import TorchPrepared
from drivetrain_precision import Bf16Updates, LossScaler, Policy
from drivetrain_precision.dtypes.dtype_policy import NAMES
from drivetrain_precision.dtypes.fp32_islands import Fp32Island, matching_modules
from drivetrain_state import Context


class TorchBackend:
    """The base class of all backends. Used alone, it neither wraps models nor changes gradients.

    Without `settings`, the backend's section has its defaults. Without a `reducer`, torch's autograd alone runs
    backwards.
    """

    settings_section: ClassVar[str | None] = None
    settings_type: ClassVar[type[Any] | None] = None
    needs_group: ClassVar[bool] = False

    def __init__(
        self,
        context: Context,
        policy: Policy,
        *,
        window: AccumulationWindow,
        settings: Any = None,
        reducer: GradientReducer | None = None,
    ) -> None:
        if context.plan is not None and context.plan.expert > 1:
            raise ValueError(f"parallelism expert={context.plan.expert}: no backend divides experts yet")
        if self.needs_group and context.group is None:
            raise RuntimeError(
                f"the {self.settings_section} backend needs a process group, and this context has none; "
                "connect(needs_group=True) makes one in a single process too"
            )
        self.context = context
        self.policy = policy
        self.window = window
        self.settings: Any = self.settings_or_defaults(settings)
        self._tracker = GradientTracker(
            context, window, reducer or ParameterGradients(loss_scaler(context, policy)), policy.settings
        )
        self.scaler = self._tracker.scaler
        self._is_closed = False  # whether models were forgotten
        self._prepared: list[TorchPrepared] = []
        self._trained: list[GradientGroup] = []  # groups with an optimizer
        self._islands: Islands = {}  # of the models that are being prepared
        self._updates = updates_of(policy.dtypes)

    @classmethod
    def settings_or_defaults(cls, settings: Any) -> Any:
        """Return the given settings, or the defaults of this class's section if None."""
        return settings if settings is not None or cls.settings_type is None else cls.settings_type()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that the user calls. The model is already on its device and under autocast."""
        return model

    def make_prepared(self, model: nn.Module) -> TorchPrepared:
        """Return the `Prepared` of a wrapped model."""
        return TorchPrepared(model, context=self.context, tracker=self._tracker)

    def check_models(self, models: Sequence[nn.Module], trained_by: Mapping[nn.Module, Optimizer]) -> None:
        """Refuse models that cannot be placed, before any change; `trained_by` maps models to first optimizers."""
        del trained_by
        for model in models:
            check_values(model)

    def undo_prepare(self, placed: Sequence[TorchPrepared], error: BaseException) -> None:
        """Restore the `placed` models after a failed `prepare`; note in `error` any change that cannot be undone."""
        del error
        for prepared in placed:
            prepared.release()

    def move_optimizer_state(self, optimizer: Optimizer) -> None:
        """Move an optimizer's earlier state to the devices on which the parameters of its models are now placed."""
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())

    def building(self) -> AbstractContextManager[Any]:
        """Create parameters directly on the backend's device in the block."""
        return self.context.device

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler]
    ) -> tuple[TorchPrepared, ...]:
        """Prepare models with their optimizers and schedulers; see `Backend.prepare`. Called on all ranks.

        Raises:
            ValueError: A model is already prepared or cannot be placed. Models are unchanged except for their device.
        """
        known = [
            *optimizers,
            *(one for p in self._prepared for o in p.optimizers for one in (o, o.optimizer)),
        ]
        check_new(models)
        check_steps_parameters(optimizers)
        check_schedulers(schedulers, known)
        pairs = self.pair(models, optimizers)
        trained_by = {model: optimizer for optimizer, model in reversed(pairs)}
        check_updates(optimizers, self.policy.dtypes)
        self.check_models(models, trained_by)
        known_models = [prepared.unwrap() for prepared in self._prepared]
        self._islands = plan_islands(models, self.policy, known=known_models)
        before = [(prepared, len(prepared.optimizers)) for prepared in self._prepared]
        try:
            for model in models:
                self._prepared.append(self._place(model, trained_by.get(model)))
            touched: list[TorchPrepared] = self._prepared[len(before) :]
            for optimizer, model in pairs:
                first = next(prepared for prepared in self._prepared if prepared.unwrap() is model)
                self.move_optimizer_state(optimizer)
                first.add_optimizer(optimizer)
                touched.append(first)
            for prepared in touched:
                prepared.updates = self._updates
            self._regroup()
        except BaseException as error:
            placed, self._prepared = self._prepared[len(before) :], [prepared for prepared, _ in before]
            for prepared, number in before:
                del prepared.optimizers[number:]
            self.undo_prepare(placed, error)
            raise
        finally:
            self._islands = {}
        for scheduler in schedulers:
            trained = ((p, o) for p in self._prepared for o in p.optimizers)
            prepared, optimizer = next(
                (p, o) for p, o in trained if scheduler.optimizer is o or scheduler.optimizer is o.optimizer
            )
            prepared.schedulers.append(
                PreparedScheduler(scheduler, optimizer, is_main=self.context.topology.is_main)
            )
            touched.append(prepared)
        return tuple(dict.fromkeys(touched))

    def pair(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[tuple[Optimizer, nn.Module]]:
        """Return each optimizer with the first model that it trains, among new and earlier models."""
        plain = [*(p.unwrap() for p in self._prepared), *models]
        return [(optimizer, plain[owners(optimizer, plain)[0]]) for optimizer in optimizers]

    def backward(
        self, loss: Tensor, *, count: Tensor | float | None = None, options: BackwardOptions = ONCE
    ) -> None:
        """Add the gradients of a loss that may flow through any of the prepared models; see `Backend.backward`."""
        if not self._prepared:
            raise AccumulationError(
                "backward() after end_training() or free_memory(), which have forgotten the models: train before "
                "them, or prepare() models and optimizers again"
                if self._is_closed
                else "backward() before prepare(model): there is no model to reduce gradients for"
            )
        owners = self._trained or self._tracker.groups
        if len(owners) > 1 and count is not None:
            raise AccumulationError(
                f"backward(count=...) with {len(owners)} models that have optimizers of their own: say with model= "
                "whose items are counted; model=(a, b) where the loss trains both"
            )
        self._tracker.backward(loss, count, owners, options=options)

    def backward_of(
        self,
        models: Sequence[Any],
        loss: Tensor,
        *,
        count: Tensor | float | None = None,
        options: BackwardOptions = ONCE,
    ) -> None:
        """Add the gradients of a loss that trains several models; see `Backend.backward_of`."""
        chosen = [one.group for one in self._prepared if any(one is prepared for prepared in models)]
        self._tracker.backward(loss, count, list(dict.fromkeys(chosen)), options=options)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """Do nothing, because a single device needs no join; see `Backend.join`."""
        del models
        return nullcontext()

    def applied(self) -> Mapping[str, object]:
        """Return the values in force, read back from the prepared models."""
        return {
            "device": str(self.context.device),
            "gradient_accumulation_steps": self.window.next_num_micro_batches,
            "mixed_precision": self.policy.mode,
            "loss_scaling": self.scaler is not None,
            "nonfinite_gradients": self.window.nonfinite_gradients,
            **read_dtypes([prepared.unwrap() for prepared in self._prepared], self.policy, self._updates),
            "reduce_dtype": self.reduce_dtype(),
        }

    def reduce_dtype(self) -> object:
        """Return the dtype in which ranks add up gradients, by its name, for the effective plan."""
        if self.policy.dtypes.reduce is None:
            return None
        return AutoValue(value=None, reason="one process has no gradients to add up")

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, if the run has a loss scale, and the reference count of counted losses."""
        return self._tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the loss scale of a saved run; refuse it if only one of the two runs scales its loss."""
        self._tracker.load_state_dict(state)

    def close(self) -> None:
        """Restore every model's original class and forget all models."""
        for group in self._tracker.groups:
            group.skips.close()
        for prepared in self._prepared:
            prepared.release()
            for optimizer in prepared.optimizers:
                optimizer.release()
        self._prepared, self._trained, self._tracker.groups = [], [], []
        self.window.reset()
        self._is_closed = True

    def _place(self, model: nn.Module, optimizer: Optimizer | None) -> TorchPrepared:
        """Place a new model, with the first optimizer that trains it."""
        del optimizer
        model.to(self.context.device)
        hold_model(model, self.policy, self.context.device, self._islands[model])
        prepare_forward(model, self.policy, self.context.device, progress=self.context.progress)
        try:
            wrapped = self.wrap(model)
        except BaseException:
            restore_forward(model)
            raise
        return self.make_prepared(wrapped)

    def _groups(self) -> list[GradientGroup]:
        """Return the group of each prepared model; models that share an optimizer or a parameter are in one group."""
        models = [prepared.unwrap() for prepared in self._prepared]
        optimizers = [o.optimizer for prepared in self._prepared for o in prepared.optimizers]
        return group_models(models, [owners(optimizer, models) for optimizer in optimizers], self._tracker)

    def _regroup(self) -> None:
        """Update the groups of models after models or optimizers were added."""
        groups = self._groups()
        for prepared, group in zip(self._prepared, groups, strict=True):
            prepared.group = group
        self._tracker.groups = dict.fromkeys(groups)
        for group in self._tracker.groups:
            group.skips.watch_always()
            group.optimizers = [o.optimizer for p in self._prepared if p.group is group for o in p.optimizers]
        self._trained = [group for group in self._tracker.groups if group.optimizers]
        self._tracker.first_losses.renew()


def loss_scaler(context: Context, policy: Policy) -> LossScaler | None:
    """Return the loss scale of a run; None without fp16."""
    return None if policy.scaling is None else LossScaler(context.device, policy.scaling)


def check_schedulers(schedulers: Sequence[Scheduler], optimizers: Sequence[object]) -> None:
    """Refuse schedulers whose optimizer is not among the prepared ones."""
    for scheduler in schedulers:
        if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
            raise PairingError(
                f"{type(scheduler).__name__}: its optimizer is not prepared; pass the optimizer to the same "
                "prepare() call, or prepare it first"
            )


def read_dtypes(
    models: Sequence[nn.Module], policy: Policy, updates: Bf16Updates | None
) -> dict[str, object]:
    """Return the models' values of the fields of the `precision` section that set dtypes.

    The field `reduce_dtype` is missing, because only the backend knows its value. Without models, the values are
    those that will be applied.
    """
    dtypes = policy.dtypes
    names = ("param_dtype", "output_dtype", "buffer_dtype", "keep_fp32", "weight_update")
    said = dtypes.said()
    found: dict[str, object] = {name: said.get(name, () if name == "keep_fp32" else None) for name in names}
    if models:
        modules = [
            m for model in models for m in unwrap_compiled(model).modules() if not isinstance(m, Fp32Island)
        ]
        if dtypes.param is not None:
            found["param_dtype"] = _dtype_names([p for m in modules for p in m.parameters(recurse=False)])
        if dtypes.buffer is not None:
            found["buffer_dtype"] = _dtype_names([b for m in modules for b in m.buffers(recurse=False)])
        if dtypes.output is not None:
            returned = {type(m).output_dtype if isinstance(m, PreparedForward) else None for m in models}
            found["output_dtype"] = _join_names({None if one is None else NAMES[one] for one in returned})
        found["keep_fp32"] = tuple(p for p in dtypes.keep_fp32 if any(_are_islands(m, p) for m in models))
    if dtypes.update is not None:
        applied = "nearest" if updates is None else updates.rounding
        reason = "param_dtype='bf16' alone would lose small updates"
        found["weight_update"] = applied if dtypes.is_update_said else AutoValue(value=applied, reason=reason)
    return found


def _dtype_names(tensors: Sequence[Tensor]) -> str | None:
    """Return the names of the dtypes of plain floating-point tensors."""
    plain = [t for t in tensors if t.is_floating_point() and (t.dtype in NAMES or t.dtype.itemsize == 8)]
    return _join_names({NAMES.get(t.dtype, "fp64") for t in plain})


def _join_names(names: set[str | None]) -> str | None:
    return next(iter(names)) if len(names) == 1 else " and ".join(sorted(map(str, names))) or None


def _are_islands(model: nn.Module, pattern: str) -> bool:
    """Return whether a pattern matches modules of a model and all matching modules compute in fp32."""
    matched = matching_modules(unwrap_compiled(model), pattern).values()
    return bool(matched) and all(isinstance(module, Fp32Island) for module in matched)
