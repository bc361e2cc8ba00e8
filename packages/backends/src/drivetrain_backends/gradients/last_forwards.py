"""The last training forward of each model, run again to find the first value in it that is not finite."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from drivetrain_backends.compat import buffers_in
from drivetrain_precision.compat import compiled_part
from drivetrain_precision.scaling.gradient_report import first_of_ranks
from drivetrain_precision.scaling.gradient_watch import Gather, GradientWatch


class _Forward(NamedTuple):
    """A call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int  # among the calls since the last `forget`, from 1


class LastForwards:
    """The arguments of each model's last forward with gradients, until its optimizer steps."""

    def __init__(self) -> None:
        self._forwards = WeakKeyDictionary[nn.Module, _Forward]()  # in the order of the calls

    def note(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the arguments of a forward, unless torch.compile traces it."""
        if not torch.compiler.is_compiling():
            before = self._forwards.pop(model, None)
            self._forwards[model] = _Forward(args, kwargs, 1 if before is None else before.number + 1)

    def forget(self, models: Sequence[nn.Module]) -> None:
        """Drop the arguments of models."""
        for model in models:
            self._forwards.pop(model, None)

    def find_nonfinite(
        self, models: Sequence[nn.Module], device: torch.device, *, gather: Gather
    ) -> str | None:
        """Run the last forwards of models again; return a sentence on the first value that is not finite.

        None if a rank has kept no forward. Called on all ranks of `gather`, whose weights are those of the forwards.
        They run without torch.compile, keep no activations, and leave random states and buffers as they were. An
        error of a forward is told.
        """
        found = [(model, forward) for model, forward in self._forwards.items() if model in models]
        self.forget(models)
        if not all(gather(bool(found))):
            return None
        failure = None
        watched = {"" if len(models) == 1 else str(i): model for i, model in enumerate(models)}
        with GradientWatch(watched, underflow=False, inside_compiled=True) as watch:
            try:
                with _without_traces(models, device):
                    for model, forward in found:
                        model(*forward.args, **forward.kwargs)
            except Exception as error:  # noqa: BLE001 the gradients are the error, of which this one is a part
                failure = f"{type(error).__name__}: {error}"
            own = watch.first_nonfinite(gather=lambda value: [value])
        told: list[Any] = gather((own, failure))
        first = first_of_ranks([each for each, _ in told])
        if first is not None:
            return f"The first value that was not finite is {first}"
        if failures := [each for _, each in told if each is not None]:
            return f"Its layer is not known, as the last forward, run again, ended in {failures[0]}"
        if not watch.has_seen:
            return None
        is_compiled = any(compiled_part(module) for model in models for module in model.modules())
        again = "run again uncompiled" if is_compiled else "run again"
        most = max(forward.number for _, forward in found)
        last, elsewhere = "The forward", "the loss or backward"
        if most > 1:
            last, elsewhere = f"The last of {most} forwards", f"an earlier one, {elsewhere}"
        where = f"it arose in {elsewhere}, of which precision.watch_underflow names the layer"
        return f"{last}, {again}, was finite: {where}"


@contextmanager
def _without_traces(models: Sequence[nn.Module], device: torch.device) -> Generator[None]:
    """Have forwards in the block leave random states and buffers as they were, and keep no activations."""
    holders = [buffers_in(module) for model in models for module in model.modules()]
    held = [(of, name, b, b.clone()) for of in holders for name, b in of.items() if b is not None]
    devices = [] if device.type == "cpu" else [device]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices, device_type=device.type))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_drop, _drop))
        try:
            yield
        finally:
            with torch.no_grad():
                for of, name, buffer, values in held:
                    of[name] = buffer.copy_(values)


def _drop(_: object) -> None:
    """Stand for an activation, of which no backward follows."""
