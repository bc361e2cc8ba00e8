"""A model trained by torch's own backward: the common part of the single and DDP backends."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain_backends.gradients.clipping import check_clip
from drivetrain_backends.gradients.nonfinite import SMALLEST_LOSS_SCALE, nonfinite_error
from drivetrain_backends.gradients.tracker import GradientGroup, GradientLedger
from drivetrain_backends.modules.autocast_forward import restore_forward
from drivetrain_backends.modules.compile import check_plain_state, load_plain_state, plain_state
from drivetrain_backends.modules.parameter_guard import STEPS_A_LOOK, KnownParameters
from drivetrain_backends.optim.optimizer import PreparedOptimizer, StepResult
from drivetrain_backends.optim.parameter_matching import parameter_names
from drivetrain_backends.optim.scheduler import PreparedScheduler, check_numbers, load_progress, progress_of
from drivetrain_backends.state_dict.optimizer_state import check_named_state, load_named_state, named_state
from drivetrain_state import Context

_OPEN = StepResult(stepped=False, skipped=False)
_STEPPED = StepResult(stepped=True, skipped=False)


class TorchPrepared:
    """A model with its optimizers, trained by torch's autograd on one device or replicated by DDP.

    Args:
        model: The module that the user calls: their own module or its DDP wrapper.
        context: The ranks and the device.
        ledger: The gradient state that the backend's models share.

    Attributes:
        model: The module that the user calls.
        optimizers: The prepared optimizers that train this model.
        schedulers: The prepared schedulers of those optimizers.
        group: The gradients of this model and of the models that share an optimizer or a parameter with it.
    """

    def __init__(self, model: nn.Module, *, context: Context, ledger: GradientLedger) -> None:
        self.model = model
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.group = GradientGroup([self.unwrap()], ledger)
        self._context = context
        self._watch = context.watch
        self._is_shared = isinstance(model, DistributedDataParallel)  # ranks step together
        self._ledger = ledger
        self._window = ledger.window
        self._prepared_at = ledger.num_backwards
        self._known = KnownParameters(self.unwrap())
        self._until_look = 1

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Add the gradients of `loss`, of shape (); see `Prepared.backward`."""
        self._ledger.backward(loss, count, (self.group,))

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local in the block; see `Prepared.no_sync`."""
        if not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        # DDP learns a static graph from its first backward, which must therefore reduce (otherwise an internal
        # assertion fails, torch 2.9 to 2.15). Reducing early changes nothing: the mean of equal means is the mean.
        if self.model.static_graph and self._ledger.num_backwards == self._prepared_at:
            return nullcontext()
        return self.model.no_sync()

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one optimizer if the window is closed. Called on all ranks."""
        if not self._window.closing:
            return _OPEN
        group = self.group
        if self._ledger.unreduced:
            self._ledger.check_reduced(optimizer)
        self._until_look -= 1
        if not self._until_look:
            self._until_look = STEPS_A_LOOK
            self._known.look()
            self._known.look_at_unfrozen(group.optimizers)
        group.finish()
        if self._window.nonfinite_gradients != "ignore":
            group.judge(optimizer)
            self._refuse_nonfinite()
        if group.stage == "empty":
            group.check_known()
        group.stage = "used"
        self._ledger.has_stepped = True
        self._watch.mark("optimizer step")
        if group.overflowed:
            return StepResult(stepped=False, skipped=True, grad_norm=group.grad_norm)
        optimizer.step()
        if group.grad_norm is None:
            return _STEPPED
        return StepResult(stepped=True, skipped=False, grad_norm=group.grad_norm)

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear one optimizer's gradients, except those accumulated in an open window."""
        group = self.group
        if group.stage == "open" and group.keeps_gathered:
            return
        optimizer.zero_grad(set_to_none)
        group.cleared_by(optimizer)

    def clip(
        self,
        parameters: Iterable[Tensor] | None = None,
        *,
        norm: float | None = None,
        norm_type: float = 2.0,
        value: float | None = None,
    ) -> Tensor | None:
        """Clip by norm or by value once the window is closed; see `Prepared.clip`.

        Raises:
            TypeError, ValueError: The arguments are invalid, or the parameters belong to no prepared model.
        """
        check_clip(norm, norm_type, value)
        if not self._window.closing:
            return None
        chosen = self._chosen(parameters)
        groups = self._ledger.finish_all_of(chosen)
        if not groups:
            raise ValueError(
                f"clip over {len(chosen)} parameters, of which no prepared model trains one: pass model.parameters() "
                "of what prepare() returned, each time anew"
            )
        if value is not None:
            self._judge_together(groups)
            if not any(group.overflowed for group in groups):
                self._clamp(chosen, value)
            for group in groups:
                group.keep_marks()
            return None
        assert norm is not None
        total = self._norm_of(chosen, norm_type)
        self._judge_together(groups, chosen, total)
        if not any(group.overflowed for group in groups):
            self._scale(chosen, total, norm)
        for group in groups:
            group.grad_norm = total
            group.keep_marks()
        return total

    def unwrap(self) -> nn.Module:
        """Return the user's module without DDP's wrapper; it still computes in the run's precision."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @contextmanager
    def gathered(self, *, write: bool = False) -> Generator[None]:
        """Run the block directly, because parameters are always full; see `Prepared.gathered`."""
        yield
        if write and self._context.group is not None:
            for parameter in self.unwrap().parameters():
                dist.broadcast(parameter.detach(), src=0)

    def release(self) -> nn.Module:
        """Undo the preparation and return the user's module with its own class."""
        return restore_forward(self.unwrap())

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizers and schedulers; see `Prepared.state_dict`.

        Raises:
            ReplacedParameterError: The model has parameters that were not prepared.
        """
        self._known.look()
        names = self._names()
        return {
            "model": plain_state(self.unwrap()),
            "optimizers": [named_state(o.optimizer, names) for o in self.optimizers],
            **progress_of(self.optimizers, self.schedulers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; see `Prepared.load_state_dict`.

        Raises:
            ValueError: The checkpoint holds a different number of optimizers or schedulers, or other parameters;
                nothing was loaded.
            ReplacedParameterError: The model has parameters that were not prepared.
        """
        self._known.look()
        check_numbers(state, self.optimizers, self.schedulers, of=type(self.unwrap()).__name__)
        names = self._names()
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            check_named_state(optimizer.optimizer, names, saved)
        self._load_model(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            load_named_state(optimizer.optimizer, names, saved)
        load_progress(state, self.optimizers, self.schedulers)

    def _chosen(self, parameters: Iterable[Tensor] | None) -> list[Tensor]:
        """Return the parameters to clip: the model's own unless others are given."""
        return list(self.unwrap().parameters() if parameters is None else parameters)

    def _norm_of(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)

    def _scale(self, parameters: Sequence[Tensor], total: Tensor, max_norm: float) -> None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)

    def _clamp(self, parameters: Sequence[Tensor], value: float) -> None:
        if any(parameter.grad is not None for parameter in parameters):  # torch needs at least one
            nn.utils.clip_grad_value_(parameters, value)

    def _judge_together(
        self, groups: Sequence[GradientGroup], clipped: Sequence[Tensor] = (), norm: Tensor | None = None
    ) -> None:
        """Check for infinities before clipping, which would spread a NaN to all gradients and hide an infinity.

        Groups clipped by one norm are skipped together, because the norm is meaningless once a part of it is not
        finite.
        """
        if self._window.nonfinite_gradients != "ignore":
            held = set(map(id, clipped)) if norm is not None and norm.isfinite().item() else set[int]()
            for group in groups:
                group.judge(are_finite=all(id(p) in held for p in group.parameters() if p.grad is not None))
        if any(group.overflowed for group in groups):
            for group in groups:
                group.overflowed = True
        self._refuse_nonfinite(groups)

    def _refuse_nonfinite(self, groups: Sequence[GradientGroup] = ()) -> None:
        """End the run on non-finite gradients, if its settings say so and no smaller loss scale is left to try.

        Raises:
            NonFiniteGradientError: The run ends; the message names the first parameter.
        """
        groups = [group for group in groups or (self.group,) if group.overflowed]
        if self._window.nonfinite_gradients != "raise" or not groups:
            return
        scaler = self._ledger.scaler
        if scaler is not None and scaler.value > SMALLEST_LOSS_SCALE:
            return
        models = [model for group in groups for model in group.models]
        names = parameter_names({str(i): model for i, model in enumerate(models)})
        raise nonfinite_error(
            self._context,
            {name: parameter.grad for parameter, name in names.items() if parameter.requires_grad},
            step=1 + max((o.num_steps for o in self.optimizers), default=0),
            bad_loss=any(group.bad_loss is not None and bool(group.bad_loss.item()) for group in groups),
            # Unaveraged gradients may be bad on this rank alone, and a rank without batches does not step: no
            # collective.
            alone=self._ledger.is_joined or not self._is_shared,
        )

    def _load_model(self, state: Mapping[str, Any]) -> None:
        check_plain_state(self.unwrap(), state)
        load_plain_state(self.unwrap(), state)

    def _names(self) -> dict[Tensor, str]:
        return parameter_names({str(i): model for i, model in enumerate(self.group.models)})
