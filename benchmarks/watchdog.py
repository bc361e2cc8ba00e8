"""What the hang watchdog costs while nothing hangs: one DDP training step on two gloo processes, with and without it.

    uv run --group bench python benchmarks/watchdog.py

Both contestants are the same prepared model; the watchdog is started before a turn and stopped after it.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from rounds import Table, on_two_ranks, repeated, report, take_turns
from torch import nn

from drivetrain import Accelerator
from drivetrain_config.environ import exported
from drivetrain_state import Context, StateSettings, start_watchdog

STEPS = 1000  # in one turn: some of the watchdog's looks fall into each


def training_step(accelerator: Accelerator) -> Callable[[], None]:
    """One step of a tiny MLP, as users write it."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    inputs, targets = torch.randn(8, 16), torch.randn(8, 1)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    return step


def watched(context: Context, turn: Callable[[], float]) -> Callable[[], float]:
    """The same turn while the watchdog runs, at its default of one look a second."""

    def with_watchdog() -> float:
        watchdog = start_watchdog(
            topology=context.topology, settings=StateSettings(), record=context.progress
        )
        try:
            return turn()
        finally:
            watchdog.stop()

    return with_watchdog


def measure(arguments: argparse.Namespace) -> None:
    """Time the steps. Called on both ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with exported(DRIVETRAIN_STATE__WATCHDOG="false"):
        accelerator = Accelerator(cpu=True)
    turn = repeated(training_step(accelerator), times=STEPS, before=dist.barrier)
    turns = {"without the watchdog": turn, "with the watchdog": watched(accelerator.context, turn)}
    table = Table(
        title="One DDP training step, two processes",
        unit="us",
        measured=take_turns(turns, rounds=arguments.rounds),
    )
    if dist.get_rank() == 0:
        report("watchdog", [table], arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    on_two_ranks(__doc__, measure, rounds=31)
