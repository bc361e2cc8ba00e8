"""The last training forward of each model, run again to find the first value in it that is not finite."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from drivetrain_backends.compat import buffers_in
from drivetrain_precision.scaling.gradient_report import first_of_ranks
from drivetrain_precision.scaling.gradient_watch import Gather, GradientWatch


class LastForwards:
    """The arguments of each model's last forward with gradients, until its optimizer steps."""

    def __init__(self) -> None:
        # In the order of the calls: the arguments, and the number of the call since the last `forget`, from 1.
        self._forwards = WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Mapping[str, Any], int]]()

    def note(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the arguments of a forward, unless torch.compile traces it."""
        if not torch.compiler.is_compiling():
            _, _, number = self._forwards.pop(model, ((), {}, 0))
            self._forwards[model] = args, kwargs, number + 1

    def forget(self, models: Sequence[nn.Module]) -> None:
        """Drop the arguments of models."""
        for model in models:
            self._forwards.pop(model, None)

    def find_nonfinite(
        self, models: Sequence[nn.Module], device: torch.device, *, gather: Gather
    ) -> str | None:
        """Run the last forwards of models again; return a sentence on the first value that is not finite.

        None if a rank has kept no forward, or nothing in them can be watched. Called on all ranks of `gather`, before
        weights change. An error of a forward is told in the sentence.
        """
        calls = [(model, *call) for model, call in self._forwards.items() if model in models]
        self.forget(models)
        if not all(gather(bool(calls))):
            return None
        watched = {"" if len(models) == 1 else str(i): model for i, model in enumerate(models)}
        with GradientWatch(watched, underflow=False, inside_compiled=True) as watch:
            failure = _run_again(calls, device)
            own = watch.first_nonfinite(gather=lambda value: [value])
        told: list[Any] = gather((own, failure))
        if (first := first_of_ranks([each for each, _ in told])) is not None:
            return f"The first value that was not finite is {first}"
        if failures := [each for _, each in told if each is not None]:
            return f"Its layer is not known, as the last forward, run again, ended in {failures[0]}"
        if not watch.has_seen:
            return None
        most = max(number for *_, number in calls)
        last, earlier = (
            ("The forward", "") if most == 1 else (f"The last of {most} forwards", "an earlier one, ")
        )
        return (
            f"{last}, run again in eager mode, was finite: it arose in {earlier}the loss or backward, of which "
            "precision.watch_underflow names the layer"
        )


def _run_again(calls: Sequence[tuple[Any, ...]], device: torch.device) -> str | None:
    """Run forwards that keep no activations, and leave random states and buffers as they were; return an error."""
    holders = [buffers_in(module) for model, *_ in calls for module in model.modules()]
    held = [(of, name, b, b.clone()) for of in holders for name, b in of.items() if b is not None]
    devices = [] if device.type == "cpu" else [device]
    try:
        with (
            torch.random.fork_rng(devices=devices, device_type=device.type),
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),  # by which a watch knows a training forward
            torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)),
        ):
            for model, args, kwargs, _ in calls:
                model(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 the gradients are the run's error, and this is a part of its message
        return f"{type(error).__name__}: {error}"
    finally:
        with torch.no_grad():
            for of, name, buffer, values in held:
                of[name] = buffer.copy_(values)
    return None
