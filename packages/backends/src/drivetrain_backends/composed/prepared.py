"""A prepared model with its optimizers, trained as the strategy of its backend says."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.composed.strategy import Strategy
from drivetrain_backends.errors import NonFiniteGradientError
from drivetrain_backends.gradients.multi_tensor import scale_to_norm, stored_values
from drivetrain_backends.gradients.nonfinite import nonfinite_error
from drivetrain_backends.gradients.tracker import GradientGroup, GradientTracker
from drivetrain_backends.modules.module_proxy import ModuleProxy
from drivetrain_backends.modules.parameter_guard import KnownParameters
from drivetrain_backends.optim.host_optimizers import page_states
from drivetrain_backends.optim.optimizer import PreparedOptimizer, StepResult
from drivetrain_backends.optim.parameter_matching import parameter_names
from drivetrain_backends.optim.scheduler import PreparedScheduler, check_numbers, load_progress, progress_of
from drivetrain_backends.state_dict.dtensor import local
from drivetrain_backends.state_dict.optimizer_state import check_named_state, load_named_state
from drivetrain_precision import Bf16Updates, is_low_bit, optimizer_states
from drivetrain_precision.optim.bf16_updates import forget_updates
from drivetrain_state import Context, ProgressMark, gather_object

logger = logging.getLogger(__name__)

OPEN = StepResult(stepped=False, skipped=False)
STEPPED = StepResult(stepped=True, skipped=False)
_STEP = ProgressMark.OPTIMIZER_STEP  # to read the member takes as long as a call


class ComposedPrepared:
    """A model with its optimizers, trained by torch's autograd as a strategy says."""

    def __init__(
        self, model: nn.Module, *, context: Context, tracker: GradientTracker, strategy: Strategy
    ) -> None:
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
        self._gradients = strategy.gradients
        self._layout = strategy.layout
        self._guards = strategy.guards
        self._stages = strategy.stages
        self._direct = strategy.direct
        self._known = KnownParameters(self.unwrap())  # as the transforms have left them
        self._untold = set[Optimizer]()  # low-bit ones, until their first step has made their states

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer that trains this model."""
        self.optimizers.append(PreparedOptimizer(optimizer, self))
        if is_low_bit(optimizer):
            self._untold.add(optimizer)

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Add the gradients of `loss`, of shape (); see `Prepared.backward`."""
        self._tracker.backward(loss, count, (self.group,))

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local in the block; see `Prepared.no_sync`."""
        return self._gradients.local(self.unwrap())

    def trained_alone(self) -> AbstractContextManager[None]:
        """Step on this rank's own gradients in the block; see `SupportsLocalSteps`. Called on all ranks."""
        return self._gradients.alone(self.unwrap())

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one optimizer if the window is closed; on a non-finite gradient, skip the step or end the run.

        Called on all ranks.
        """
        if not self._window.closing:
            return OPEN
        group = self.group
        for guard in self._guards:
            guard.before_step(group, optimizer)
        if self._direct is None:
            result = self._step(optimizer)
        else:
            with self._direct():
                result = self._step(optimizer)
        if result.stepped:
            for guard in self._guards:
                guard.after_step(group, optimizer)
        return result

    def _step(self, optimizer: Optimizer) -> StepResult:
        group = self.group
        if self._known.look_now_and_then():
            self._known.look_at_unfrozen(group.optimizers)
            if self._tracker.scaler is not None:
                self._known.look_at_forms("and fp16 scales the gradients of what it was prepared with")
        group.finish()
        if self._window.treatment != "warn":
            group.check_finite(optimizer)
            self._refuse_nonfinite((group,))
        group.use()
        self._progress.mark(_STEP)
        final = group.final
        if final.overflowed:
            group.skips.skipped(optimizer, gather=self._gather)
            return StepResult(stepped=False, skipped=True, grad_norm=final.norm)
        if self.updates is None:
            optimizer.step()
        else:
            self.updates.step(optimizer)
        if self._untold and optimizer in self._untold:
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
        if self._direct is None:
            optimizer.zero_grad(set_to_none)
        else:
            with self._direct():
                optimizer.zero_grad(set_to_none)
        group.clear(optimizer)
        if group.stage == "empty":
            self._gradients.cleared(group.models)

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
        for guard in self._guards:
            guard.before_clip(self.group)
        if self._direct is None:
            return self._clip(parameters, norm, norm_type, value)
        with self._direct():
            return self._clip(parameters, norm, norm_type, value)

    @torch.no_grad()
    def _clip(
        self, parameters: Iterable[Tensor] | None, norm: float | None, norm_type: float, value: float | None
    ) -> Tensor | None:
        chosen = self._layout.chosen(self.unwrap(), parameters)
        groups = self._tracker.finish_all_of(chosen)
        if not groups:
            raise ValueError(
                f"clip over {len(chosen)} parameters, of which no prepared model trains one: pass model.parameters() "
                "of what prepare() returned, each time anew"
            )
        measured = [parameter for parameter in chosen if parameter.grad is not None]
        gradients = [parameter.grad for parameter in measured if parameter.grad is not None]
        total = None if norm is None else self._layout.norm(measured, float(norm_type))
        if total is not None and norm_type == math.inf:
            # A sum keeps a NaN; the maximum of XLA, and that of gloo over ranks, may drop it.
            total = torch.where(self._layout.norm(measured, 1.0).isnan(), math.nan, total)
        if self._are_finite(groups, chosen, total):
            held = [stored_values(local(gradient)) for gradient in gradients]
            if norm is not None and total is not None:
                scale_to_norm(held, total, norm)
            if value is not None:
                for gradient in held:
                    gradient.clamp_(-value, value)
        for group in groups:
            if total is not None:
                group.set_norm(total)
            group.record()
        return total

    def unwrap(self) -> nn.Module:
        """Return the user's module without a wrapper; it still computes in the run's precision."""
        return self.model.module if isinstance(self.model, ModuleProxy) else self.model

    def gathered(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Gather the full parameters in the block; see `Prepared.gathered`. Called on all ranks."""
        return self._layout.gathered(self.unwrap(), write=write)

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizers and schedulers, unless the model has parameters that were not prepared."""
        self._layout.open(self.group.models, [one.optimizer for one in self.optimizers])
        self._known.look()
        return {**self._read_state(), **progress_of(self.optimizers, self.schedulers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state of any backend; see `Prepared.load_state_dict`. Called on all ranks.

        A state with other parameters, or another number of optimizers or schedulers, is refused before any change.
        """
        self._layout.open(self.group.models)
        self._known.look()
        check_numbers(state, self.optimizers, self.schedulers, of=type(self.unwrap()).__name__)
        self._load_state(state)
        load_progress(state, self.optimizers, self.schedulers)

    def weights(self) -> dict[str, Any]:
        """Return the model's state; see `SupportsWeights`. Called on all ranks."""
        self._layout.open(self.group.models)
        return self._layout.model_state(self.unwrap())

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load the model's state; see `SupportsWeights`. Called on all ranks."""
        self._layout.open(self.group.models)
        self._layout.load_model(self.unwrap(), weights)

    def _read_state(self) -> dict[str, Any]:
        """Return the state of the model and its optimizers."""
        layout, names = self._layout, self._names()
        return {
            "model": layout.model_state(self.unwrap()),
            "optimizers": [layout.optimizer_state(one.optimizer, names) for one in self.optimizers],
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the model and its optimizers."""
        names = self._names()
        divided = [self._layout.divide(saved, names) for saved in state["optimizers"]]
        for optimizer, saved in zip(self.optimizers, divided, strict=True):
            check_named_state(optimizer.optimizer, names, saved)
        self._layout.load_model(self.unwrap(), state["model"])
        for optimizer, saved in zip(self.optimizers, divided, strict=True):
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

    def _are_finite(
        self, groups: Sequence[GradientGroup], clipped: Sequence[Tensor] = (), norm: Tensor | None = None
    ) -> bool:
        """Return whether gradients are finite, before clipping spreads a NaN to all gradients or hides an infinity.

        Groups clipped by one norm are skipped together, because the norm is meaningless if any gradient in it is not
        finite.
        """
        if self._window.treatment != "warn":
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
        if self._window.treatment != "raise":
            return
        bad = [group for group in groups if group.final.overflowed]
        if bad:
            if (scaler := self._tracker.scaler) is None or not scaler.can_fall():
                raise self._nonfinite_error(bad)
        elif self._tracker.forwards is not None:
            self._tracker.forwards.forget(self.group.models)

    def _nonfinite_error(self, groups: Sequence[GradientGroup]) -> NonFiniteGradientError:
        """Return the error of groups whose gradients are not finite. Called on all ranks that step together."""
        forwards, models = self._tracker.forwards, [model for group in groups for model in group.models]
        names = parameter_names({str(i): model for i, model in enumerate(models)})
        layers = [group.skips.first_nonfinite(gather=self._gather) for group in groups]
        layer = next((layer for layer in layers if layer is not None), None)
        found = None if layer is None else f"The first value that was not finite is {layer}"
        # Alone, a rank would wait for others in forwards that exchange what they compute, as a batch norm does.
        waits_for_none = self._context.topology.world_size == 1 or not self._is_alone
        if found is None and forwards is not None and waits_for_none:
            found = forwards.find_nonfinite(gather=self._gather)
        bad_losses = [is_bad for group in groups if (is_bad := group.losses.is_bad) is not None]
        return nonfinite_error(
            self._context,
            {name: self._gradient_of(p) for p, name in names.items() if p.requires_grad},
            step=1 + max((o.num_steps for o in self.optimizers), default=0),
            bad_loss=any(bool(is_bad.item()) for is_bad in bad_losses),
            alone=self._is_alone,
            found=found,
        )

    @property
    def _is_alone(self) -> bool:
        """True if other ranks may not be at this step, or hold other parameters: no collective may be called.

        Unaveraged gradients may be bad on this rank alone, and a rank without batches does not step.
        """
        is_apart = self._stages is not None or self._gradients.is_joined
        return is_apart or not self._gradients.steps_together(self.unwrap())

    def _gather(self, value: Any) -> list[Any]:
        """Gather a value from the ranks that step together into a list. Called on all of them."""
        return [value] if self._is_alone else gather_object(self._context, value)

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the reduced gradient of a parameter, or this rank's part of a sharded one. Called on all ranks."""
        return parameter.grad

    def _names(self) -> dict[Tensor, str]:
        return parameter_names({str(i): model for i, model in enumerate(self.group.models)})


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
