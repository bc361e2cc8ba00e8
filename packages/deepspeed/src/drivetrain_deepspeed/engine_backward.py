"""Run backwards through engines, and protect each engine from gradients of other losses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from drivetrain_backends.compat import as_they_are, foreach_norm, version_of
from drivetrain_backends.errors import AccumulationError, UnreducedGradientError
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.gradients.reducer import ONCE, BackwardOptions, GradientReducer
from drivetrain_deepspeed.compat import close_window
from drivetrain_deepspeed.gradients import ReducedGradients, gradients_of
from drivetrain_deepspeed.library import accumulates
from drivetrain_messages import list_some
from drivetrain_precision import LossScaler
from drivetrain_state import ProgressMark, ProgressRecord


@dataclass(slots=True, kw_only=True, eq=False)
class _TrainedModel:
    """A model with its engine."""

    engine: Any
    gradients: ReducedGradients
    parameters: list[Tensor]
    names: list[str]
    is_ready: bool = False  # whether the last backward made the gradients ready for the step
    # The fingerprint of `.grad` after the last backward; None without one.
    left: list[tuple[int, int]] | None = None
    placeholder_gradient: tuple[Tensor, Tensor] | None = None  # a parameter and the zeros in its `.grad`
    # A function that raises a better error than the one that a backward raised, if it knows one.
    explain: Callable[[Exception], None] | None = None
    # Whether the next backward is watched for writes into parameters, as the first one is.
    is_watched: bool = True
    # The hooks on frozen parameters.
    of_frozen: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    # The hooks on trained parameters.
    of_trained: list[RemovableHandle] = field(default_factory=list[RemovableHandle])

    def put_stand_in(self) -> None:
        """Put zeros into the `.grad` that stages 2 and 3 leave empty, to detect code that clips or drops `.grad`."""
        with as_they_are():
            trained = [parameter for parameter in self.parameters if parameter.requires_grad]
            if trained and all(parameter.grad is None for parameter in trained):
                smallest = min(trained, key=Tensor.numel)
                smallest.grad = zeros = torch.zeros_like(smallest)
                self.placeholder_gradient = smallest, zeros

    def take_stand_in(self) -> None:
        """Remove the zeros of `put_stand_in`, unless other code has replaced them."""
        parameter, zeros = self.placeholder_gradient or (None, None)
        self.placeholder_gradient = None
        if parameter is not None and parameter.grad is zeros:
            parameter.grad = None

    def check_unedited(self) -> None:
        """Refuse gradients that other code changed since the last backward: the engine steps on a copy of them."""
        if self.left is not None and self.left != _fingerprint(self.parameters):
            raise AccumulationError(
                f"the gradients of {type(self.engine.module).__name__} were edited after backward(), but its "
                "DeepSpeed engine steps on a copy of its own. Clip with accelerator.clip_grad_norm_(), drop "
                "gradients with optimizer.zero_grad(), and change the loss in place of its gradients"
            )

    def values(self) -> list[float]:
        """Return the norm of each parameter that a step could change; packed integers are left out."""
        norms = iter(foreach_norm([p.detach() for p in self.parameters if p.is_floating_point()]))
        return [float(next(norms)) if p.is_floating_point() else 0.0 for p in self.parameters]

    def check_unwritten(self, before: list[float]) -> None:
        """Refuse parameters whose values changed during the first backward."""
        self.is_watched = False
        if odd := [n for n, old, new in zip(self.names, before, self.values(), strict=True) if old != new]:
            raise AccumulationError(
                f"{list_some(odd)}: written during backward(), as by an optimizer that steps in a hook "
                "(register_post_accumulate_grad_hook, register_hook), before gradients are averaged: remove the "
                "hook, and step the prepared optimizer after backward()"
            )

    def forget(self) -> None:
        """Record that the gradients were dropped."""
        self.is_ready, self.left = False, None
        self.take_stand_in()


class EngineReducer(GradientReducer):
    """A reducer that runs backwards through the models' engines, one at a time; see `GradientReducer`."""

    not_alone = (
        "its DeepSpeed engine averages gradients at each step; use backend='ddp' for steps without averaging"
    )
    not_joined = (
        "DeepSpeed's engines hang when a rank steps less often; prepare the loader, whose tails "
        "keep ranks in step"
    )

    def __init__(
        self, window: AccumulationWindow, scaler: LossScaler | None, progress: ProgressRecord
    ) -> None:
        super().__init__(scaler)
        self._progress = progress
        self._window = window
        self._models: dict[nn.Module, _TrainedModel] = {}
        self._running: nn.Module | None = None

    def add(self, engine: Any, names: Mapping[Tensor, str]) -> ReducedGradients:
        """Register an engine under the model it trains."""
        added = _TrainedModel(
            engine=engine,
            gradients=gradients_of(engine),
            parameters=list(names),
            names=list(names.values()),
            is_watched=not engine.zero_optimization_partition_weights(),  # stage 3 counts writes to its parts
        )
        added.of_frozen += [
            _hook(parameter, lambda name=name: _refuse_unfrozen(name))
            for parameter, name in names.items()
            if not parameter.requires_grad and parameter.is_floating_point() and not parameter.is_inference()
        ]
        self._models[engine.module] = added
        # A hook costs 1 us per backward; a single model needs none, because no other model's loss reaches it.
        for model, one in self._models.items() if len(self._models) > 1 else ():
            if not one.of_trained:
                trained = (p for p in model.parameters() if p.requires_grad)
                one.of_trained += [_hook(p, lambda model=model: self.notice(model)) for p in trained]
        return added.gradients

    def remove(self, model: nn.Module) -> None:
        """Remove a model's engine and its hooks."""
        if (removed := self._models.pop(model, None)) is not None:
            for handle in removed.of_frozen + removed.of_trained:
                handle.remove()
            removed.forget()

    def backward(self, loss: Tensor, models: Sequence[nn.Module], *, options: BackwardOptions = ONCE) -> None:
        """Run the engine's backward; see `GradientReducer.backward`."""
        if options.said:
            raise AccumulationError(
                f"backward({options.said}): DeepSpeed's engine moves the gradients of all parameters after each; "
                "add the losses of one forward up and call backward() once"
            )
        if len(models) != 1 or models[0] not in self._models:
            raise AccumulationError(
                f"backward() of a loss of {' and '.join(type(m).__name__ for m in models)}: a DeepSpeed engine "
                "trains one model with one optimizer; put models that one loss trains into one nn.Module, and say "
                "backward(..., model=) where several are prepared"
            )
        one = self._models[models[0]]
        if one.is_ready and self._window.closing:
            raise AccumulationError(
                f"a second backward() of {type(models[0]).__name__} in the micro-batch that closes its window: with "
                "offload_optimizer the first has moved the gradients already; add the losses up and call it once"
            )
        one.check_unedited()
        one.take_stand_in()
        closes = self._window.closing and one.gradients.in_backward
        if self.scaler is not None:
            one.gradients.scale_losses(self.scaler.value)
        before = one.values() if one.is_watched else None
        self._running = models[0]
        try:
            one.engine.set_gradient_accumulation_boundary(closes)
            one.engine.backward(loss, scale_wrt_gas=False)
        except (RuntimeError, AttributeError, AssertionError) as error:
            if before is not None:
                one.check_unwritten(before)
            if one.explain is not None:
                one.explain(error)
            raise
        finally:
            self._running = None
        if before is not None:
            one.check_unwritten(before)
        one.is_ready = one.is_ready or closes
        one.put_stand_in()
        one.left = _fingerprint(one.parameters)

    def explain_by(self, model: nn.Module, explain: Callable[[Exception], None]) -> None:
        """Have `explain` called with each error of a model's backwards."""
        self._models[model].explain = explain

    def check_outside_backward(self, model: nn.Module) -> None:
        """Raise an error if a hook calls `optimizer.step()` or `zero_grad()` while the model's backward runs."""
        if self._running is model:
            raise AccumulationError(
                f"the optimizer of {type(model).__name__} was called by a hook of its backward, before its DeepSpeed "
                "engine has all gradients: remove the hook (register_post_accumulate_grad_hook, register_hook), and "
                "call optimizer.step() and zero_grad() after accelerator.backward()"
            )

    def steps_together(self, model: nn.Module) -> bool:
        """Return True, because engines step on all ranks."""
        del model
        return True

    def finalize(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Reduce and correct the gradients; the step checks for overflows; see `GradientReducer.finalize`."""
        one = self._models[models[0]]
        one.check_unedited()
        one.left = None
        one.take_stand_in()
        if one.is_ready:
            one.is_ready = False
        else:
            self._progress.mark(ProgressMark.AVERAGING)
            close_window(one.engine)
            self._progress.mark(ProgressMark.AVERAGING_DONE)
        if factor is not None:
            one.gradients.correct(float(factor))
        return False

    def forget(self, model: nn.Module) -> None:
        """Record that the gradients of a model were dropped."""
        self._models[model].forget()

    def notice(self, model: nn.Module) -> None:
        """Refuse a backward that reaches an engine other than the running one."""
        if self._running is model:
            return
        reached = self._describe(model)
        if not accumulates(model.parameters()):
            raise AccumulationError(
                f"torch.autograd.grad() went through {reached}, whose DeepSpeed engine takes every backward through "
                "its outputs for one that trains it: a gradient penalty, or any other loss made of gradients, is not "
                "trained under DeepSpeed; choose backend='ddp' or 'single'"
            )
        if self._running is None:
            raise AccumulationError(
                f"loss.backward() reached {reached}, whose gradients are its DeepSpeed engine's: call "
                "accelerator.backward(loss) in its place"
            )
        raise AccumulationError(
            f"a loss of {self._describe(self._running)} reached {reached}, whose DeepSpeed engine would take its "
            f"gradients for its own: freeze {type(model).__name__} while it is passed through, "
            "requires_grad_(False), and unfreeze it before its own forward"
        )

    def _describe(self, model: nn.Module) -> str:
        """Return a model's class name; if several models have that class, add the model's number."""
        name = type(model).__name__
        same = [one for one in self._models if type(one).__name__ == name]
        return name if len(same) == 1 else f"{name} (number {same.index(model) + 1} of {len(same)} prepared)"


def _fingerprint(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return values that change whenever a gradient in `.grad` changes."""
    with as_they_are():
        return [(id(gradient), version_of(gradient)) for p in parameters if (gradient := p.grad) is not None]


def _refuse_unfrozen(name: str) -> None:
    """Refuse a gradient of a parameter that was frozen when its engine was built."""
    raise UnreducedGradientError(
        f"{name} was frozen when prepare() built its DeepSpeed engine, which neither averages nor steps it. Set "
        "requires_grad before prepare(); to unfreeze later, free_memory() and prepare() again"
    )


def _hook(parameter: Tensor, call: Callable[[], None]) -> RemovableHandle:
    """Call `call` whenever a gradient reaches a parameter, before the gradient is added; also for a frozen one."""

    @unserializable_hook
    def reached(_: Tensor) -> None:
        call()

    is_trained = parameter.requires_grad
    # register_hook requires it; the hook costs nothing while the parameter is frozen.
    parameter.requires_grad_(True)
    handle = parameter.register_hook(reached)
    parameter.requires_grad_(is_trained)
    return handle
