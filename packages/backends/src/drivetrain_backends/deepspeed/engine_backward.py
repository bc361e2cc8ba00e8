"""Run backwards through engines, and protect each engine from gradients of other losses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from drivetrain_backends.deepspeed.compat import close_window
from drivetrain_backends.deepspeed.gradients import ReducedGradients, gradients_of
from drivetrain_backends.deepspeed.library import accumulates
from drivetrain_backends.errors import AccumulationError, UnreducedGradientError
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_precision import LossScaler


class EngineCarrier:
    """A carrier that runs backwards through the models' engines, one at a time; see `GradientCarrier`.

    Args:
        window: The accumulation window.
        scaler: The loss scale, for fp16.
    """

    def __init__(self, window: AccumulationWindow, scaler: LossScaler | None) -> None:
        self._window = window
        self._scaler = scaler
        self._engines: dict[nn.Module, tuple[Any, ReducedGradients]] = {}
        self._ready: set[nn.Module] = set()  # the models whose gradients the last backward made ready
        self._running: nn.Module | None = None
        self._parameters: dict[nn.Module, list[Tensor]] = {}
        self._left: dict[nn.Module, list[tuple[int, int]]] = {}  # `.grad` after the last backward
        self._stand_ins: dict[
            nn.Module, tuple[Tensor, Tensor]
        ] = {}  # a parameter and the zeros in its `.grad`
        self._watched: dict[nn.Module, list[RemovableHandle]] = {}  # hooks on the trained parameters
        self._frozen: dict[nn.Module, list[RemovableHandle]] = {}

    def add(self, engine: Any, names: Mapping[Tensor, str]) -> ReducedGradients:
        """Register an engine under the model it trains.

        Args:
            engine: The DeepSpeed engine.
            names: The name of each parameter of the model.
        """
        model: nn.Module = engine.module
        self._engines[model] = engine, (gradients := gradients_of(engine))
        self._parameters[model] = list(names)
        self._frozen[model] = [
            _hook(parameter, lambda name=name: _refuse_unfrozen(name))
            for parameter, name in names.items()
            if not parameter.requires_grad and parameter.is_floating_point() and not parameter.is_inference()
        ]
        # A hook costs 1 us per backward; a single model needs none, because no other model's loss reaches it.
        for one in self._engines if len(self._engines) > 1 else ():
            if one not in self._watched:
                trained = (p for p in one.parameters() if p.requires_grad)
                self._watched[one] = [_hook(p, lambda one=one: self.notice(one)) for p in trained]
        return gradients

    def remove(self, model: nn.Module) -> None:
        """Remove a model's engine and its hooks."""
        for handle in self._frozen.pop(model, []) + self._watched.pop(model, []):
            handle.remove()
        self._engines.pop(model, None)
        self._parameters.pop(model, None)
        self.forget(model)

    def run(self, loss: Tensor, models: Sequence[nn.Module]) -> None:
        """Run the engine's backward; see `GradientCarrier.run`.

        Raises:
            AccumulationError: The loss trains several models, or one without an engine.
        """
        if len(models) != 1 or models[0] not in self._engines:
            raise AccumulationError(
                f"backward() of a loss of {' and '.join(type(m).__name__ for m in models)}: a DeepSpeed engine "
                "trains one model with one optimizer; put models that one loss trains into one nn.Module, and say "
                "backward(..., model=) where several are prepared"
            )
        engine, gradients = self._engines[models[0]]
        if models[0] in self._ready and self._window.closing:
            raise AccumulationError(
                f"a second backward() of {type(models[0]).__name__} in the micro-batch that closes its window: with "
                "offload_optimizer the first has moved the gradients already; add the losses up and call it once"
            )
        self._check_unedited(models[0])
        self._take_stand_in(models[0])
        closes = self._window.closing and gradients.in_backward
        if self._scaler is not None:
            gradients.scale_losses(self._scaler.value)
        self._running = models[0]
        try:
            engine.set_gradient_accumulation_boundary(closes)
            engine.backward(loss, scale_wrt_gas=False)
        finally:
            self._running = None
        if closes:
            self._ready.add(models[0])
        self._put_stand_in(models[0])
        self._left[models[0]] = _fingerprint(self._parameters[models[0]])

    def leaves(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the parameters; see `GradientCarrier.leaves`."""
        return [parameter for model in models for parameter in model.parameters()]

    def settle(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Reduce and correct the gradients; the step checks for overflows; see `GradientCarrier.settle`."""
        engine, gradients = self._engines[models[0]]
        self._check_unedited(models[0])
        self._left.pop(models[0], None)
        self._take_stand_in(models[0])
        if models[0] in self._ready:
            self._ready.discard(models[0])
        else:
            close_window(engine)
        if factor is not None:
            gradients.correct(float(factor))
        return False

    def forget(self, model: nn.Module) -> None:
        """Record that the gradients of a model were dropped."""
        self._ready.discard(model)
        self._left.pop(model, None)
        self._take_stand_in(model)

    def _put_stand_in(self, model: nn.Module) -> None:
        """Put zeros where stages 2 and 3 leave no gradient, to detect code that clips or drops `.grad`."""
        trained = [parameter for parameter in self._parameters[model] if parameter.requires_grad]
        if trained and all(parameter.grad is None for parameter in trained):
            smallest = min(trained, key=Tensor.numel)
            smallest.grad = zeros = torch.zeros_like(smallest)
            self._stand_ins[model] = smallest, zeros

    def _take_stand_in(self, model: nn.Module) -> None:
        parameter, zeros = self._stand_ins.pop(model, (None, None))
        if parameter is not None and parameter.grad is zeros:
            parameter.grad = None

    def _check_unedited(self, model: nn.Module) -> None:
        """Refuse gradients that changed since the last backward: the engine has reduced them or will do so.

        Raises:
            AccumulationError: The gradients have changed.
        """
        if (left := self._left.get(model)) is not None and left != _fingerprint(self._parameters[model]):
            raise AccumulationError(
                f"the gradients of {type(model).__name__} were changed, set or dropped by hand since backward(): its "
                "DeepSpeed engine has reduced them already, or has them to reduce yet, so that `.grad` is not what "
                "it steps on. Clip with accelerator.clip_grad_norm_(), drop them with optimizer.zero_grad(), and "
                "change the loss in place of its gradients"
            )

    def notice(self, model: nn.Module) -> None:
        """Refuse a backward that reaches an engine other than the running one.

        Raises:
            AccumulationError: The backward reaches such an engine.
        """
        if self._running is model:
            return
        reached = self._told(model)
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
            f"a loss of {self._told(self._running)} reached {reached}, whose DeepSpeed engine would take its "
            f"gradients for its own: freeze {type(model).__name__} while it is passed through, "
            "requires_grad_(False), and unfreeze it before its own forward"
        )

    def _told(self, model: nn.Module) -> str:
        """Return a model's class name, with its number if several models have that class."""
        name = type(model).__name__
        same = [one for one in self._engines if type(one).__name__ == name]
        return name if len(same) == 1 else f"{name} (number {same.index(model) + 1} of {len(same)} prepared)"


def _fingerprint(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return values that change whenever a gradient in `.grad` changes."""
    return [(id(gradient), gradient._version) for p in parameters if (gradient := p.grad) is not None]


def _refuse_unfrozen(name: str) -> None:
    """Refuse a gradient of a parameter that was frozen when its engine was built.

    Raises:
        UnreducedGradientError: Raised by every call; the message names the parameter.
    """
    raise UnreducedGradientError(
        f"{name} was frozen when prepare() built its DeepSpeed engine, which neither averages nor steps it. Set "
        "requires_grad before prepare(); to unfreeze later, free_memory() and prepare() again"
    )


def _hook(parameter: Tensor, call: Callable[[], None]) -> RemovableHandle:
    """Call `call` whenever a gradient reaches a parameter, before it is added; the parameter may be frozen."""

    @unserializable_hook
    def reached(_: Tensor) -> None:
        call()

    is_trained = parameter.requires_grad
    parameter.requires_grad_(
        True
    )  # required by register_hook; the hook costs nothing while the parameter is frozen
    handle = parameter.register_hook(reached)
    parameter.requires_grad_(is_trained)
    return handle
