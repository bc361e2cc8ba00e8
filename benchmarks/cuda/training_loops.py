"""One training step, as plain torch and each library document it: forward, backward, clip, step, zero_grad."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from bench import Bench
from torch import Tensor, nn

Step = Callable[[], None]
Made = tuple[nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What all contestants train.

    Attributes:
        device: Where.
        make: Makes the model and its optimizer, there.
        loss: The loss of a model on the one batch.
        precision: "no", or "bf16" for autocast.
        compiler: The backend of torch.compile; None to run eagerly.
    """

    device: torch.device
    make: Callable[[], Made]
    loss: Callable[[nn.Module], Tensor]
    precision: str = "no"
    compiler: str | None = None

    def compiled(self, model: Any) -> Any:
        """Return the model, compiled where that is asked for."""
        return model if self.compiler is None else torch.compile(model, backend=self.compiler)


def raw_step(training: Training, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step of plain torch."""
    model = training.compiled(model)
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    if training.precision == "bf16":
        autocast = partial(torch.autocast, training.device.type, torch.bfloat16)

    def step() -> None:
        if autocast is None:
            loss = training.loss(model)
        else:
            with autocast():
                loss = training.loss(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def drivetrain_accelerator(training: Training, *, backend: str | None = None, **sections: Any) -> Any:
    """An Accelerator of drivetrain."""
    from drivetrain import Accelerator

    return Accelerator(
        cpu=training.device.type == "cpu",
        mixed_precision=training.precision,  # pyright: ignore[reportArgumentType]  "no" or "bf16"
        backend=backend,
        sections={"run": {"show_plan": False}, **sections},
    )


def accelerate_accelerator(training: Training) -> Any:
    """An Accelerator of Accelerate."""
    from accelerate import Accelerator

    return Accelerator(cpu=training.device.type == "cpu", mixed_precision=training.precision)


def accelerated_step(accelerator: Any, training: Training) -> Step:
    """The step that both document."""
    model, optimizer = accelerator.prepare(*training.make())
    model = training.compiled(model)

    def step() -> None:
        accelerator.backward(training.loss(model))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fabric_step(training: Training) -> Step:
    """The step of Lightning Fabric, which comes alone or with Lightning."""
    name = "lightning_fabric" if find_spec("lightning_fabric") else "lightning.fabric"
    precision = {"no": "32-true", "bf16": "bf16-mixed"}[training.precision]
    fabric = import_module(name).Fabric(
        accelerator=training.device.type, devices=1, precision=precision
    )  # fmt: skip
    model, optimizer = training.make()
    model, optimizer = fabric.setup(training.compiled(model), optimizer)

    def step() -> None:
        fabric.backward(training.loss(model))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def makers(bench: Bench, training: Training) -> dict[str, Callable[[], Step]]:
    """Return what makes each contestant's step, with the peers that are installed."""
    found: dict[str, Callable[[], Step]] = {
        "raw torch": lambda: raw_step(training, *training.make()),
        "drivetrain": lambda: accelerated_step(drivetrain_accelerator(training), training),
    }
    if bench.has("Accelerate"):
        found["Accelerate"] = lambda: accelerated_step(accelerate_accelerator(training), training)
    if bench.has("Lightning Fabric"):
        found["Lightning Fabric"] = partial(fabric_step, training)
    return found
