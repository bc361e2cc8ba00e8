"""A prepared model with its optimizers, trained by torch's autograd: the base class for all backends."""

import logging
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain_backends.gradients.nonfinite import nonfinite_error
from drivetrain_backends.gradients.tracker import GradientGroup, GradientTracker
from drivetrain_backends.modules.autocast_forward import restore_forward
from drivetrain_backends.modules.compile import check_plain_state, load_plain_state, plain_state
from drivetrain_backends.modules.module_proxy import ModuleProxy
from drivetrain_backends.modules.parameter_guard import KnownParameters
from drivetrain_backends.optim.host_optimizers import page_states
from drivetrain_backends.optim.optimizer import PreparedOptimizer, StepResult
from drivetrain_backends.optim.parameter_matching import parameter_names
from drivetrain_backends.optim.scheduler import PreparedScheduler, check_numbers, load_progress, progress_of
from drivetrain_backends.state_dict.dtensor import broadcast_parts
from drivetrain_backends.state_dict.optimizer_state import check_named_state, load_named_state, named_state
from drivetrain_precision import Bf16Updates, is_low_bit, optimizer_states
from drivetrain_precision.optim.bf16_updates import forget_updates
from drivetrain_state import Context, ProgressMark, gather_object

logger = logging.getLogger(__name__)

OPEN = StepResult(stepped=False, skipped=False)
STEPPED = StepResult(stepped=True, skipped=False)


class TorchPrepared:
    """A model with its optimizers, trained by torch's autograd."""

    # Whether all ranks step this model at the same time, so that they may gather an error.
    steps_together = False

    def __init__(self, model: nn.Module, *, context: Context, tracker: GradientTracker) -> None:
        self.model = model  # the module that the user calls
        self.optimizers: list[PreparedOptimizer] = []  # the prepared optimizers that train this model
        self.schedulers: list[PreparedScheduler] = []  # the prepared schedulers of those optimizers
        # The gradients of this model and of the models that share an optimizer or a parameter with it.
        self.group = GradientGroup([self.unwrap()], tracker)
        # The object that steps optimizers whose parameters are held in bf16; None if they step by themselves.
        self.updates: Bf16Updates | None = None
        self._context = context
        self._progress = context.progress
        self._tracker = tracker
        self._window = tracker.window
        self._known = self.known_parameters()
        self._untold = set[Optimizer]()  # low-bit ones, until their first step has made their states

    def known_parameters(self) -> KnownParameters:
        """Return the record of the model's parameters, as they are at the end of `prepare`."""
        return KnownParameters(self.unwrap())

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer that trains this model."""
        self.optimizers.append(PreparedOptimizer(optimizer, self))
        if is_low_bit(optimizer):
            self._untold.add(optimizer)

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Add the gradients of `loss`, of shape (); see `Prepared.backward`."""
        self._tracker.backward(loss, count, (self.group,))

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing, because gradients are always local; see `Prepared.no_sync`."""
        return nullcontext()

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one optimizer if the window is closed; on a non-finite gradient, skip the step or end the run."""
        if not self._window.closing:
            return OPEN
        group = self.group
        if self._known.look_now_and_then():
            self._known.look_at_unfrozen(group.optimizers)
            if self._tracker.scaler is not None:
                self._known.look_at_forms("and fp16 scales the gradients of what it was prepared with")
        group.finish()
        if self._window.nonfinite_gradients != "ignore":
            group.check_finite(optimizer)
            self._refuse_nonfinite((group,))
        group.use()
        self._progress.mark(ProgressMark.OPTIMIZER_STEP)
        final = group.final
        if final.overflowed:
            group.skips.skipped(optimizer, gather=self._gather)
            return StepResult(stepped=False, skipped=True, grad_norm=final.norm)
        if self.updates is None:
            optimizer.step()
        else:
            self.updates.step(optimizer)
        if optimizer in self._untold:
            self._tell_states(optimizer)
        if group.skips.is_active:
            group.skips.stepped(optimizer, gather=self._gather)
        return (
            STEPPED if final.norm is None else StepResult(stepped=True, skipped=False, grad_norm=final.norm)
        )

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear one optimizer's gradients, except those accumulated in an open window."""
        group = self.group
        if group.stage == "open" and group.is_accumulating:  # a call less in most steps
            return
        optimizer.zero_grad(set_to_none)
        group.clear(optimizer)

    def clip(
        self,
        parameters: Iterable[Tensor] | None = None,
        *,
        norm: float | None = None,
        norm_type: float = 2.0,
        value: float | None = None,
    ) -> Tensor | None:
        """Clip by norm or by value once the window is closed; see `Prepared.clip`."""
        check_clip(norm, norm_type, value)
        if not self._window.closing:
            return None
        chosen = self._chosen(parameters)
        groups = self._tracker.finish_all_of(chosen)
        if not groups:
            raise ValueError(
                f"clip over {len(chosen)} parameters, of which no prepared model trains one: pass model.parameters() "
                "of what prepare() returned, each time anew"
            )
        if value is not None:
            if self._are_finite(groups):
                self._clamp(chosen, value)
            for group in groups:
                group.record()
            return None
        assert norm is not None
        total = self._norm_of(chosen, norm_type)
        if self._are_finite(groups, chosen, total):
            self._scale(chosen, total, norm)
        for group in groups:
            group.set_norm(total)
            group.record()
        return total

    def unwrap(self) -> nn.Module:
        """Return the user's module without a wrapper; it still computes in the run's precision."""
        return (
            self.model.module if isinstance(self.model, ModuleProxy | DistributedDataParallel) else self.model
        )

    @contextmanager
    def gathered(self, *, write: bool = False) -> Generator[None]:
        """Run the block directly, because parameters are always full; see `Prepared.gathered`."""
        yield
        if write:
            broadcast_parts(weights_of(self.unwrap()), self._context)

    def release(self) -> nn.Module:
        """Undo the preparation and return the user's module, with its original class restored."""
        return restore_forward(self.unwrap())

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizers and schedulers, unless the model has parameters that were not prepared."""
        self._known.look()
        return {**self._read_state(), **progress_of(self.optimizers, self.schedulers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state of any backend; see `Prepared.load_state_dict`. Called on all ranks.

        A state with other parameters, or another number of optimizers or schedulers, is refused before any change.
        """
        self._known.look()
        check_numbers(state, self.optimizers, self.schedulers, of=type(self.unwrap()).__name__)
        self._load_state(state)
        load_progress(state, self.optimizers, self.schedulers)

    def _read_state(self) -> dict[str, Any]:
        """Return the state of the model and its optimizers."""
        names = self._names()
        return {
            "model": plain_state(self.unwrap()),
            "optimizers": [named_state(o.optimizer, names) for o in self.optimizers],
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the model and its optimizers."""
        names = self._names()
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            check_named_state(optimizer.optimizer, names, saved)
        self._load_model(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            notes = load_named_state(optimizer.optimizer, names, saved)
            page_states(optimizer.optimizer)
            if notes and self._context.topology.is_main:
                logger.warning("%s: %s", type(optimizer.optimizer).__name__, "; ".join(notes))
            rounding = None if self.updates is None else self.updates.rounding
            num_dropped = forget_updates(optimizer.optimizer, rounding)
            if num_dropped and self._context.topology.is_main:
                logger.info(
                    "the checkpoint was trained with weight_update='kahan', this run with %s: what was rounded off "
                    "%d parameters is dropped, less than half of their last bit",
                    repr(rounding) if rounding else "the optimizer's own updates",
                    num_dropped,
                )

    def _chosen(self, parameters: Iterable[Tensor] | None) -> list[Tensor]:
        """Return the parameters to clip: the given parameters; for None, those of the model."""
        return list(weights_of(self.unwrap()) if parameters is None else parameters)

    def _norm_of(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)

    def _scale(self, parameters: Sequence[Tensor], total: Tensor, max_norm: float) -> None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)

    def _clamp(self, parameters: Sequence[Tensor], value: float) -> None:
        if any(parameter.grad is not None for parameter in parameters):  # torch needs at least one
            nn.utils.clip_grad_value_(parameters, value)

    def _are_finite(
        self, groups: Sequence[GradientGroup], clipped: Sequence[Tensor] = (), norm: Tensor | None = None
    ) -> bool:
        """Return whether gradients are finite, before clipping spreads a NaN to all gradients or hides an infinity.

        Groups clipped by one norm are skipped together, because the norm is meaningless if any gradient in it is not
        finite.
        """
        if self._window.nonfinite_gradients != "ignore":
            held = set(map(id, clipped)) if norm is not None and norm.isfinite().item() else set[int]()
            for group in groups:
                are_finite = all(id(p) in held for p in group.parameters() if p.grad is not None)
                group.check_finite(are_finite=are_finite)
        if not any(group.final.overflowed for group in groups):
            return True
        for group in groups:
            group.skip()
        self._refuse_nonfinite(groups)
        return False

    def _tell_states(self, optimizer: Optimizer) -> None:
        """Log the number of bits of a low-bit optimizer's states; warn if low bits save little memory."""
        self._untold.discard(optimizer)
        states = optimizer_states(optimizer)
        if self._context.topology.is_main:
            saves_little = 2 * states.elements_low_bit < states.elements
            logger.log(logging.WARNING if saves_little else logging.INFO, "%s", states)

    def _refuse_nonfinite(self, groups: Sequence[GradientGroup]) -> None:
        """Raise on non-finite gradients, if the settings end the run and no smaller loss scale is left to try."""
        groups = [group for group in groups if group.final.overflowed]
        if self._window.nonfinite_gradients != "raise" or not groups:
            return
        scaler = self._tracker.scaler
        if scaler is not None and scaler.can_fall():
            return
        models = [model for group in groups for model in group.models]
        names = parameter_names({str(i): model for i, model in enumerate(models)})
        layers = [group.skips.first_nonfinite(gather=self._gather) for group in groups]
        bad_losses = [bad for group in groups if (bad := group.losses.is_bad) is not None]
        raise nonfinite_error(
            self._context,
            {name: self._gradient_of(p) for p, name in names.items() if p.requires_grad},
            step=1 + max((o.num_steps for o in self.optimizers), default=0),
            bad_loss=any(bool(bad.item()) for bad in bad_losses),
            alone=self._is_alone,
            layer=next((layer for layer in layers if layer is not None), None),
        )

    @property
    def _is_alone(self) -> bool:
        """True if other ranks may not be at this step, so that no collective may be called.

        Unaveraged gradients may be bad on this rank alone, and a rank without batches does not step.
        """
        return self._tracker.reducer.is_joined or not self.steps_together

    def _gather(self, value: Any) -> list[Any]:
        """Gather a value from the ranks that step together into a list. Called on all of them."""
        return [value] if self._is_alone else gather_object(self._context, value)

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the reduced gradient of a parameter, or this rank's part of a sharded one. Called on all ranks."""
        return parameter.grad

    def _load_model(self, state: Mapping[str, Any]) -> None:
        check_plain_state(self.unwrap(), state)
        load_plain_state(self.unwrap(), state)

    def _names(self) -> dict[Tensor, str]:
        return parameter_names({str(i): model for i, model in enumerate(self.group.models)})


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a module, even if the module overrides `parameters` and leaves some out."""
    return [parameter for _, parameter in nn.Module.named_parameters(module)]


def check_clip(norm: object, norm_type: object, value: object) -> None:
    """Refuse invalid arguments of a clip; an infinite norm is valid and only measures."""
    if (norm is None) == (value is None):
        raise ValueError(f"clip(norm={norm!r}, value={value!r}): give one of the two")
    for name, number in (("norm", norm), ("norm_type", norm_type), ("value", value)):
        if number is None or (type(number) is float and number > 0):  # the common case, at every step
            continue
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"clip({name}={number!r}): it is a number above 0, not {type(number).__name__}")
        if math.isnan(number) or number <= 0:
            raise ValueError(
                f"clip({name}={number!r}): it must be above 0; an infinite norm measures and clips nothing"
            )
