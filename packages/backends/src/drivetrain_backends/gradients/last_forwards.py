"""The last training forward of each model, run again to find the first value in it that is not finite."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from drivetrain_backends.compat import buffers_in
from drivetrain_precision.nested_tensors import without_graphs
from drivetrain_precision.scaling.gradient_report import first_of_ranks
from drivetrain_precision.scaling.gradient_watch import Gather, GradientWatch


class _Forward(NamedTuple):
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    states: Sequence[Tensor]  # of the random generators of the CPU and the device
    number: int  # of the call since the last `forget`, from 1


class LastForwards:
    """The arguments of each model's last forward with gradients, until its optimizer steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forwards = WeakKeyDictionary[nn.Module, _Forward]()  # in the order of the calls

    @cached_property
    def _generators(self) -> Sequence[Any]:
        """The modules of the CPU's random generator, which is torch's own, and of an accelerator's."""
        return [torch] if self._device.type == "cpu" else [torch, torch.get_device_module(self._device)]

    def note(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the arguments of a forward, unless torch.compile traces it."""
        if not torch.compiler.is_compiling():
            last = self._forwards.pop(model, None)
            self._forwards[model] = _Forward(
                args=without_graphs(args),  # by another model, whose graph ends with its own step
                kwargs=without_graphs(kwargs),
                states=[each.get_rng_state() for each in self._generators],
                number=1 if last is None else last.number + 1,
            )

    def forget(self, models: Sequence[nn.Module]) -> None:
        """Drop the arguments of models."""
        for model in models:
            self._forwards.pop(model, None)

    def find_nonfinite(self, *, gather: Gather) -> str | None:
        """Run the last forwards again, of all models; return a sentence on the first value that is not finite.

        None if a rank has kept no forward, or nothing in them can be watched. Called on all ranks of `gather`, before
        weights change. An error of a forward is told in the sentence.
        """
        forwards = dict(self._forwards)
        self._forwards.clear()
        if not all(gather(bool(forwards))):
            return None
        watched = dict(zip(_names(list(forwards)), forwards, strict=True))
        with GradientWatch(watched, underflow=False, inside_compiled=True) as watch:
            failure = self._run_again(forwards)
            own = watch.first_nonfinite(gather=lambda value: [value])
        told: list[Any] = gather((own, failure))
        if (first := first_of_ranks([each for each, _ in told])) is not None:
            return f"The first value that was not finite is {first}"
        if failures := [each for _, each in told if each is not None]:
            return f"Its layer is not known, as the last forward, run again, ended in {failures[0]}"
        if not watch.has_seen:
            return None
        most = max(forward.number for forward in forwards.values())
        last, earlier = (
            ("The forward", "") if most == 1 else (f"The last of {most} forwards", "an earlier one, ")
        )
        return (
            f"{last}, run again in eager mode, was finite: it arose in {earlier}the loss or backward, or where a "
            "forward does not repeat itself; precision.watch_underflow names the layer"
        )

    def _run_again(
        self, forwards: Mapping[nn.Module, _Forward], *, keeps_activations: bool = False
    ) -> str | None:
        """Run forwards on the same random numbers, and leave random states and buffers as they were; return an error.

        Keep activations, for which there may be no memory left, only where a forward takes gradients.
        """
        holders = [buffers_in(module) for model in forwards for module in model.modules()]
        held = [(of, name, b, b.clone()) for of in holders for name, b in of.items() if b is not None]
        devices = [] if self._device.type == "cpu" else [self._device]
        dropped = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse_gradient)
        state = random.getstate()
        try:
            with (
                torch.random.fork_rng(devices=devices, device_type=self._device.type),
                torch.compiler.set_stance("force_eager"),
                torch.enable_grad(),  # by which a watch knows a training forward
                nullcontext() if keeps_activations else dropped,
            ):
                for model, forward in forwards.items():
                    for generator, values in zip(self._generators, forward.states, strict=True):
                        generator.set_rng_state(values)
                    model(*forward.args, **forward.kwargs)
        except _TakesGradientError:
            needs_activations = True
        except Exception as error:  # noqa: BLE001 the gradients are the run's error, and this is a part of its message
            return f"{type(error).__name__}: {error}"
        else:
            needs_activations = False
        finally:
            random.setstate(state)
            with torch.no_grad():
                for of, name, buffer, values in held:
                    of[name] = buffer.copy_(values)
        return self._run_again(forwards, keeps_activations=True) if needs_activations else None


def _names(models: Sequence[nn.Module]) -> list[str]:
    """Return a prefix for the layers of each model: none for the only one."""
    if len(models) == 1:
        return [""]
    kinds, seen = [type(model).__name__ for model in models], Counter[str]()
    names = list[str]()
    for kind in kinds:
        seen[kind] += 1
        names.append(kind if kinds.count(kind) == 1 else f"{kind} {seen[kind]}")
    return names


class _TakesGradientError(RuntimeError):
    """A forward takes gradients itself, as a force field does."""


def _refuse_gradient(_: object) -> NoReturn:
    raise _TakesGradientError
