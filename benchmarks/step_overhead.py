"""What a training step costs beyond a raw PyTorch loop: tiny MLP, one process, CPU.

    uv run --group bench python benchmarks/step_overhead.py

Every loop does what its library documents for gradient accumulation, backward, optimizer step and scheduler.
Lightning Fabric has neither accumulation nor a scheduler of its own; its loop steps torch's.
"""

from collections.abc import Callable
from typing import Any

import torch
from rounds import Goal, Table, installed, parse_arguments, repeated, report, take_turns
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

STEPS = 100  # in one turn: short, so that what else the machine does falls on all alike
INPUTS = torch.randn(8, 16)
TARGETS = torch.randn(8, 1)

Step = Callable[[], None]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, StepLR]:
    """A tiny MLP, with what trains it."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, StepLR(optimizer, step_size=1000)


def loss_of(model: nn.Module, inputs: Tensor = INPUTS) -> Tensor:
    """The loss on the one batch."""
    return nn.functional.mse_loss(model(inputs), TARGETS)


def raw_step(*, scheduled: bool) -> Step:
    """PyTorch alone."""
    model, optimizer, scheduler = parts()

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        if scheduled:
            scheduler.step()
        optimizer.zero_grad()

    return step


def drivetrain_step(*, scheduled: bool) -> Step:
    """The documented loop of drivetrain."""
    from drivetrain import Accelerator

    return accelerated_step(Accelerator(cpu=True), scheduled=scheduled)


def train_step(*, scheduled: bool) -> Step:
    """The same in one call of drivetrain's."""
    from drivetrain import Accelerator

    model, optimizer, scheduler = parts()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer, *([scheduler] if scheduled else []))

    def step() -> None:
        accelerator.train_step(INPUTS, loss=loss_of)

    return step


def accelerate_step(*, scheduled: bool) -> Step:
    """The documented loop of Accelerate."""
    from accelerate import Accelerator

    return accelerated_step(Accelerator(cpu=True), scheduled=scheduled)


def accelerated_step(accelerator: Any, *, scheduled: bool) -> Step:
    """The loop that both document."""
    model, optimizer, scheduler = accelerator.prepare(*parts())

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model))
            optimizer.step()
            if scheduled:
                scheduler.step()
            optimizer.zero_grad()

    return step


def fabric_step(*, scheduled: bool) -> Step:
    """The documented loop of Lightning Fabric."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, scheduler = parts()
    model, optimizer = fabric.setup(model, optimizer)

    def step() -> None:
        fabric.backward(loss_of(model))
        optimizer.step()
        if scheduled:
            scheduler.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Time the loops without and with a scheduler."""
    arguments = parse_arguments(__doc__, rounds=51)
    torch.set_num_threads(1)
    makers = {
        "raw PyTorch": raw_step,
        "drivetrain": drivetrain_step,
        "drivetrain, train_step": train_step,
    }
    makers |= {"Accelerate": accelerate_step} if installed("accelerate") else {}
    makers |= {"Lightning Fabric": fabric_step} if installed("lightning-fabric") else {}
    tables: list[Table] = []
    for scheduled in (False, True):
        turns = {name: repeated(make(scheduled=scheduled), times=STEPS) for name, make in makers.items()}
        title = f"One training step{' with a scheduler' if scheduled else ''}"
        goals = [
            Goal(of=name, beside="raw PyTorch", most=10e-6, added=True)
            for name in makers
            if "drivetrain" in name
        ]
        measured = take_turns(turns, rounds=arguments.rounds)
        tables.append(Table(title=title, unit="us", measured=measured, goals=goals))
    report("step_overhead", tables, arguments)


if __name__ == "__main__":
    main()
