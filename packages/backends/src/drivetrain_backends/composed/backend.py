"""A backend composed of a `Strategy`: it pairs models with optimizers, and applies the strategy to them.

`SingleBackend`, `DDPBackend` and `FSDPBackend` are this class with three strategies.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.composed.divided_layers import across_axes
from drivetrain_backends.composed.divided_sequences import refuse_divided
from drivetrain_backends.composed.prepared import ComposedPrepared
from drivetrain_backends.composed.staged_prepared import BY_TRAIN_STEP, StagedPrepared
from drivetrain_backends.composed.strategy import ModelTransform, Strategy
from drivetrain_backends.errors import AccumulationError, PairingError
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.gradients.last_forwards import LastForwards
from drivetrain_backends.gradients.reducer import ONCE, BackwardOptions
from drivetrain_backends.gradients.tracker import GradientGroup, GradientTracker, group_models
from drivetrain_backends.modules.autocast_forward import PreparedForward
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.held_dtypes import check_updates, updates_of
from drivetrain_backends.modules.model_checks import check_new
from drivetrain_backends.optim.host_optimizers import check_steps_parameters
from drivetrain_backends.optim.parameter_matching import owners
from drivetrain_backends.optim.scheduler import PreparedScheduler, Scheduler
from drivetrain_backends.protocol import AutoValue
from drivetrain_precision import Bf16Updates, LossScaler, Policy
from drivetrain_precision.dtypes.dtype_policy import NAMES
from drivetrain_precision.dtypes.fp32_islands import Fp32Island, matching_modules
from drivetrain_state import Context


class ComposedBackend:
    """A backend for models that torch's autograd trains. A subclass names its section and composes its strategy."""

    settings_section: ClassVar[str | None] = None
    settings_type: ClassVar[type[Any] | None] = None
    needs_group: ClassVar[bool] = False
    staged: ClassVar[type[StagedPrepared]] = StagedPrepared  # what a model in stages is prepared as

    def __init__(
        self, context: Context, policy: Policy, *, window: AccumulationWindow, settings: Any = None
    ) -> None:
        if self.needs_group and context.group is None:
            raise RuntimeError(
                f"the {self.settings_section} backend needs a process group, and this context has none; "
                "connect(needs_group=True) makes one in a single process too"
            )
        self.context = context
        self.policy = policy
        self.window = window
        self.settings: Any = (
            settings if settings is not None or self.settings_type is None else self.settings_type()
        )
        self.scaler = None if policy.scaling is None else LossScaler(context.device, policy.scaling)
        forwards = LastForwards(context.device) if window.on_nonfinite == "raise" else None
        # What a strategy gives the forwards of models that can be run again by calling them; see `on_one_device`.
        self.note_forward = None if forwards is None else forwards.note
        self.strategy = self.across(self.compose())
        self._tracker = GradientTracker(context, window, self.strategy.gradients, policy.settings)
        self._tracker.forwards = forwards
        self._is_closed = False  # whether models were forgotten
        self._prepared: list[ComposedPrepared] = []
        self._trained: list[GradientGroup] = []  # groups with an optimizer
        self._updates = updates_of(policy.dtypes)

    def compose(self) -> Strategy:
        """Return the strategy. Called once, when context, policy, window, settings and scaler are set."""
        raise NotImplementedError(f"{type(self).__name__}.compose()")

    def across(self, strategy: Strategy) -> Strategy:
        """Return the strategy for a mesh with other axes than those of replicas, along which models are divided."""
        return across_axes(strategy, self.context)

    def building(self) -> AbstractContextManager[Any]:
        """Create parameters in the block where the strategy needs them; see `Backend.building`."""
        return self.context.device if self.strategy.building is None else self.strategy.building()

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler]
    ) -> tuple[ComposedPrepared, ...]:
        """Prepare models with their optimizers and schedulers; see `Backend.prepare`. Called on all ranks.

        In place of the user's module, a wrapper that `close` of this backend released may be given and is used again.

        Raises:
            ValueError: A model is already prepared or cannot be transformed. Models are unchanged except for their
                device, and for what a note of the error names.
        """
        check_steps_parameters(optimizers)
        for transform in self.strategy.transforms:
            models = transform.recall(models, optimizers)
        known = [
            *optimizers,
            *(one for p in self._prepared for o in p.optimizers for one in (o, o.optimizer)),
        ]
        check_new(models)
        if self.context.ranks("replica").size == self.context.ranks("expert").size == 1:
            for model in models:
                refuse_divided(model)
        check_schedulers(schedulers, known)
        pairs = self.pair(models, optimizers)
        check_updates(optimizers, self.policy.dtypes)
        trained_by = {model: optimizer for optimizer, model in reversed(pairs)}
        self.plan(models, optimizers, trained_by)
        before = [(prepared, len(prepared.optimizers)) for prepared in self._prepared]
        try:
            for model in models:
                self._prepared.append(self.place(model, trained_by.get(model)))
            touched: list[ComposedPrepared] = self._prepared[len(before) :]
            for optimizer, model in pairs:
                first = next(prepared for prepared in self._prepared if prepared.unwrap() is model)
                self.strategy.layout.adopt(optimizer)
                first.add_optimizer(optimizer)
                touched.append(first)
            for prepared in touched:
                prepared.updates = self._updates
            self._regroup()
        except BaseException as error:
            placed, self._prepared = self._prepared[len(before) :], [prepared for prepared, _ in before]
            for prepared, number in before:
                del prepared.optimizers[number:]
            try:
                with ExitStack() as stack:  # which goes on after an error; the last callback is called first
                    for transform in reversed(self.strategy.transforms):
                        stack.callback(transform.fail, error)
                    for prepared in placed:
                        stack.callback(self.release, prepared)
            except Exception as second:  # noqa: BLE001 the first error says what was wrong
                error.add_note(
                    f"prepare() failed, and so did what undoes it: {type(second).__name__}: {second}"
                )
            raise
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

    def plan(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        trained_by: Mapping[nn.Module, Optimizer],
    ) -> None:
        """Plan every transform before any change; `trained_by` maps each model to its first optimizer."""
        del trained_by
        for transform in self.strategy.transforms:
            transform.plan(models, optimizers)

    def place(self, model: nn.Module, optimizer: Optimizer | None) -> ComposedPrepared:
        """Apply every transform to a new model; `optimizer` is the first that trains it. Called on all ranks."""
        del optimizer
        applied: list[ModelTransform] = []
        called = model
        try:
            for transform in self.strategy.transforms:
                called = transform.apply(called)
                applied.append(transform)
        except BaseException:
            for transform in reversed(applied):
                transform.release(model)
            raise
        kind = ComposedPrepared if self.strategy.stages is None else self.staged
        return kind(called, context=self.context, tracker=self._tracker, strategy=self.strategy)

    def release(self, prepared: ComposedPrepared) -> None:
        """Undo every transform of a model, as far as torch can."""
        model = prepared.unwrap()
        for transform in reversed(self.strategy.transforms):
            transform.release(model)

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
        if self.strategy.stages is not None:
            raise AccumulationError(BY_TRAIN_STEP)
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
        if self.strategy.stages is not None:
            raise AccumulationError(BY_TRAIN_STEP)
        chosen = [one.group for one in self._prepared if any(one is prepared for prepared in models)]
        if not chosen:
            raise AccumulationError(
                "backward() of models that this backend has not prepared, or has released"
            )
        self._tracker.backward(loss, count, list(dict.fromkeys(chosen)), options=options)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """Let ranks run out of batches at different steps in the block, if gradients allow it; see `Backend.join`."""
        return self.strategy.gradients.join(models)

    def applied(self) -> Mapping[str, object]:
        """Return the values in force, read back from the prepared models."""
        found: dict[str, object] = {
            "device": str(self.context.device),
            "gradient_accumulation_steps": self.window.next_num_micro_batches,
            "mixed_precision": self.policy.mode,
            "loss_scaling": self.scaler is not None,
            "on_nonfinite": self.window.on_nonfinite,
            **read_dtypes([prepared.unwrap() for prepared in self._prepared], self.policy, self._updates),
        }
        for transform in self.strategy.transforms:
            found |= transform.applied()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, if the run has a loss scale, and the reference count of counted losses."""
        return self._tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the loss scale of a saved run; refuse it if only one of the two runs scales its loss."""
        self._tracker.load_state_dict(state)

    def close(self) -> None:
        """Undo every transform as far as torch can, and forget all models."""
        strategy, groups, prepared = self.strategy, self._tracker.groups, self._prepared
        self._prepared, self._trained, self._tracker.groups = [], [], []
        self.window.reset()
        self._is_closed = True
        with ExitStack() as stack:  # which goes on after an error; the last callback is called first
            for part in (strategy.gradients, *strategy.guards, *strategy.transforms):
                stack.callback(part.close)
            for one in prepared:
                stack.callback(self.release, one)
                for optimizer in one.optimizers:
                    stack.callback(optimizer.release)
            for group in groups:
                stack.callback(group.skips.close)

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
