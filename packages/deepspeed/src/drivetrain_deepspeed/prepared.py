"""A model whose backward, clipping and step run in a DeepSpeed engine, and the optimizer that a loop holds for it."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from drivetrain_backends.composed.prepared import OPEN, STEPPED, ComposedPrepared, check_clip
from drivetrain_backends.composed.state_layout import weights_of
from drivetrain_backends.composed.strategy import Strategy
from drivetrain_backends.errors import AccumulationError, ReplacedParameterError
from drivetrain_backends.gradients.tracker import GradientTracker
from drivetrain_backends.modules.autocast_forward import restore_forward
from drivetrain_backends.modules.replicated_weights import check_replicas
from drivetrain_backends.optim.optimizer import PreparedOptimizer, StepResult, uncopyable
from drivetrain_deepspeed.compat import release_models
from drivetrain_deepspeed.engine_backward import EngineReducer
from drivetrain_deepspeed.gradients import ReducedGradients
from drivetrain_deepspeed.master_weights import WrittenValues, converted, written_values
from drivetrain_deepspeed.model import EngineModel
from drivetrain_deepspeed.partitioned_parameter import unguard
from drivetrain_deepspeed.reduction_checks import ReachedParameters
from drivetrain_deepspeed.state import (
    forget_keyed_state,
    load_model,
    load_state,
    read_model,
    read_state,
    spread,
)
from drivetrain_state import Context, ProgressMark


class DeepSpeedPrepared(ComposedPrepared):
    """A model with its optimizer, trained by an engine."""

    def __init__(
        self,
        model: EngineModel,
        *,
        context: Context,
        tracker: GradientTracker,
        strategy: Strategy,
        reducer: EngineReducer,
        gradients: ReducedGradients | None,
        names: Mapping[Tensor, str],
        groups: list[list[str]],
    ) -> None:
        super().__init__(model, context=context, tracker=tracker, strategy=strategy)
        self.engine = model.engine
        self._reducer = reducer
        self._reduced = gradients
        self._parameter_names = names
        self._parameter_groups = groups
        trained = {parameter: name for parameter, name in names.items() if parameter.requires_grad}
        self._trained = frozenset(trained)
        self._written = WrittenValues()
        self._reached: ReachedParameters | None = None  # None for an untrained model
        self._compares_next = (
            False  # before the first step, to which forwards may have written by their batch
        )
        if gradients is not None:
            self._written = written_values(self.engine, trained, context)
            self._reached = ReachedParameters(self.engine, trained)
            self._compares_next = self.engine.zero_optimization_stage() < 3
            reducer.explain_by(model.module, self.explain)
        self._dtypes = {parameter: parameter.dtype for parameter in names}
        model.__dict__["explain"] = self.explain

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add the optimizer that the engine steps."""
        kind = PartitionedOptimizer if self.engine.zero_optimization() else PreparedOptimizer
        self.optimizers.append(kind(optimizer, self))

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step the engine if the window is closed; see `ComposedPrepared.step`. Called on all ranks."""
        self._reducer.check_outside_backward(self.unwrap())
        if not self._window.closing:
            return OPEN
        group = self.group
        if group.stage == "used":
            raise AccumulationError(
                "optimizer.step() twice after one backward(): a DeepSpeed engine clears gradients when it steps"
            )
        if group.stage == "empty":
            # As stages 0 and 1 leave it there.
            if any(parameter.grad is not None for parameter in self._trained):
                raise AccumulationError(
                    f"the optimizer of {type(self.unwrap()).__name__} steps on gradients of loss.backward(), which "
                    "its DeepSpeed engine neither averages nor steps: call accelerator.backward(loss) in its place"
                )
            return STEPPED  # without gradients nothing moves, as with torch's optimizers
        assert self._reduced is not None  # there is an optimizer
        assert self._reached is not None
        try:
            group.finish()
            self._reached.check()
        except AccumulationError:
            self._known.look()  # which names a parameter that was replaced, and is why another was not reached
            raise
        if self._compares_next:
            self._compares_next = False
            check_replicas(self._context, [self.unwrap()])
        self._written.copy_to_masters()
        group.use()
        self._progress.mark(ProgressMark.OPTIMIZER_STEP)
        if self._known.look_now_and_then():
            self._check_dtypes()
        if self._window.treatment != "warn" and not self._is_norm_finite(self._reduced):
            self._reduced.discard()
            self._reached.forget()
            group.skips.skipped(optimizer, gather=self._gather)
            return StepResult(stepped=False, skipped=True, grad_norm=group.final.norm)
        self.engine.step()
        self._reached.forget()
        self._written.note()
        stepped: bool = self.engine.was_step_applied()
        self._reduced.used()
        if self._tracker.scaler is not None:
            self._tracker.scaler.observe(overflowed=not stepped)
        if not stepped:
            group.skips.skipped(optimizer, gather=self._gather)
        elif group.skips.is_active:
            group.skips.stepped(optimizer, gather=self._gather)
        return StepResult(stepped=stepped, skipped=not stepped, grad_norm=group.final.norm)

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Drop unused gradients, except those of an open window. The engine itself clears used gradients."""
        del set_to_none
        self._reducer.check_outside_backward(self.unwrap())
        group = self.group
        if group.is_accumulating:
            return
        if group.stage != "used" and self._reduced is not None:
            self._reduced.discard()
            self._reducer.forget(self.unwrap())
            if self._reached is not None:
                self._reached.forget()
        group.clear(optimizer)

    def clip(
        self,
        parameters: Iterable[Tensor] | None = None,
        *,
        norm: float | None = None,
        norm_type: float = 2.0,
        value: float | None = None,
    ) -> Tensor | None:
        """Have the engine clip by the global norm at its next step; see `Prepared.clip`. Called on all ranks.

        Returns None after the step too, because an engine drops its gradients when it steps.

        Raises:
            ValueError: The clip is not by the 2-norm of all of the model's parameters, is to a norm of 0, or
                contradicts the engine's configured norm.
        """
        check_clip(norm, norm_type, value)
        if norm is None or norm_type != 2.0:
            what = f"value={value!r}" if norm is None else f"norm_type={norm_type!r}"
            raise ValueError(
                f"clip({what}): DeepSpeed clips by the 2-norm of all gradients; clip by norm, of type 2"
            )
        if not self._window.closing or self._reduced is None or self.group.stage in ("empty", "used"):
            return None
        self._check_clip(parameters, norm)
        self.group.finish()
        total = self._reduced.clip(norm)
        self.group.set_norm(total)
        return total

    @contextmanager
    def gathered(self, *, write: bool = False) -> Generator[None]:
        """Gather the full parameters in the block; see `Prepared.gathered`. Called on all ranks."""
        from deepspeed import zero

        parameters = weights_of(self.unwrap())
        self._written.copy_to_masters()
        with zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
            yield
            if write:
                spread(parameters)
        if write:
            self._written.note()

    def release(self) -> None:
        """End the engine, and restore the original class of the user's module."""
        release_models([self.unwrap()])
        self._reducer.remove(self.unwrap())
        forget_keyed_state(self.engine)
        self.engine.destroy()
        unguard(self._parameter_names)
        restore_forward(self.unwrap())

    def weights(self) -> dict[str, Any]:
        """Return the model's state, of masters where there are any; see `SupportsWeights`. Called on all ranks."""
        self._written.copy_to_masters()
        return read_model(self.engine)

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load the model's state, and the masters; see `SupportsWeights`. Called on all ranks."""
        load_model(self.engine, weights)
        self._written.note()
        self._written.forget()

    def _read_state(self) -> dict[str, Any]:
        """Return the state of the model and its optimizer, with full fp32 tensors. Called on all ranks."""
        self._written.copy_to_masters()
        self._written.compare()
        return read_state(self.engine, self._parameter_names, self._parameter_groups)

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the model and its optimizer. Called on all ranks."""
        load_state(self.engine, self._parameter_names, self._parameter_groups, state)
        self._written.note()
        self._written.forget()

    def explain(self, error: Exception) -> None:
        """Raise a clearer error for an error of the engine's forward or backward, if a clearer one is known."""
        name = type(self.unwrap()).__name__
        self._known.look()
        self._check_dtypes()
        if self.engine.zero_optimization_partition_weights():
            self._written.copy_to_masters()
        if "vmap" in str(error) or "functorch" in str(error):
            raise AccumulationError(
                f"{name} was called inside a transform of torch.func (vmap, jacrev, grad), which cannot pass the "
                "hooks of its DeepSpeed engine; choose backend='ddp' or 'single', or transform a model that is not "
                "prepared"
            )

    def _check_dtypes(self) -> None:
        """Refuse parameters that were converted since `prepare`."""
        if odd := [n for p, n in self._parameter_names.items() if p.dtype != self._dtypes[p]]:
            raise ReplacedParameterError(converted(odd))

    def _is_norm_finite(self, gradients: ReducedGradients) -> bool:
        """Return whether all gradients are finite, according to their norm. Called on all ranks."""
        norm = gradients.norm() if self.group.final.norm is None else self.group.final.norm
        if norm.isfinite().item():
            return True
        if self._tracker.scaler is not None:
            self._tracker.scaler.observe(overflowed=True)
        self.group.skip()
        self._refuse_nonfinite((self.group,))
        return False

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)

    def _check_clip(self, parameters: Iterable[Tensor] | None, norm: float) -> None:
        left_out = () if parameters is None else self._trained.difference(parameters)
        if any(p.requires_grad for p in left_out):
            raise ValueError(
                f"clip over some of the parameters of {type(self.unwrap()).__name__}: DeepSpeed clips by the norm of "
                "all of them; pass model.parameters()"
            )
        if not norm > 0:
            raise ValueError(
                f"clip(norm={norm!r}): must be above 0; DeepSpeed takes 0 for no clipping at all"
            )
        configured: float = self.engine.gradient_clipping()
        if configured not in (0.0, norm):
            raise ValueError(
                f"clip(norm={norm!r}) contradicts gradient_clipping={configured!r} of the DeepSpeed configuration; "
                "leave out one of the two"
            )


class PartitionedOptimizer(PreparedOptimizer):
    """An optimizer whose parameters DeepSpeed has partitioned. It accepts no new groups and cannot be copied."""

    def check_copyable(self) -> NoReturn:
        """Refuse to copy, because an engine has partitioned the parameters."""
        raise TypeError(uncopyable(self.optimizer))

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refuse a new group, because DeepSpeed (0.19) builds its lists of groups when the engine starts."""
        raise RuntimeError(
            f"add_param_group() with {len(param_group.get('params', ()))} parameters after prepare(): ZeRO stages 1 "
            "to 3 partition the groups that the optimizer has when prepare() starts its engine. Add the group before "
            "prepare(), with lr=0 until it is to be trained; or free_memory() and prepare() again"
        )


def share_groups(source: Optimizer, other: Optimizer) -> None:
    """Make two optimizers share the groups and state of `source`, even after one of them loads a state."""

    def follow(one: Optimizer, loaded: Optimizer) -> None:
        one.param_groups, one.state = loaded.param_groups, loaded.state

    follow(other, source)
    # torch creates new groups when it loads a state.
    source.register_load_state_dict_post_hook(lambda loaded: follow(other, loaded))
    other.register_load_state_dict_post_hook(lambda loaded: follow(source, loaded))


def remember_groups(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's groups and state, in case an engine fails to start."""
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [list(group["params"]) for group in groups]
    kept = dict(state)

    def give_back() -> None:
        optimizer.param_groups, optimizer.state = groups, state
        for group, own in zip(groups, parameters, strict=True):
            group["params"] = own
        state.clear()
        state.update(kept)

    return give_back
