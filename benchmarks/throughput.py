"""What measuring the throughput adds to a training step of two ranks under DDP, on the CPU.

    uv run --group bench python benchmarks/throughput.py

The same model trains with the throughput off, measured, and measured and compared between ranks every ten steps. The
ranks take each turn together, and rank 0 reports.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from rounds import Table, on_two_ranks, repeated, report, take_turns
from torch import nn

STEPS = 60  # in one turn
WIDTH, BATCH = 512, 64
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "off": {},
    "throughput": {"throughput": True},
    "throughput_every_steps=10": {"throughput_every_steps": 10, "peak_flops": 1e12},
}


def training_step(tracking: Mapping[str, Any]) -> Callable[[], None]:
    """Return the step of a documented loop over a loader without end."""
    from drivetrain import Accelerator

    sections = {"tracking": dict(tracking), "run": {"show_plan": False}}
    accelerator = Accelerator(cpu=True, backend="ddp", sections=sections)
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [torch.randn(WIDTH) for _ in range(64 * BATCH)]
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=BATCH, drop_last=True)
    )

    def batches() -> Any:
        while True:
            yield from loader

    reading = batches()

    def step() -> None:
        accelerator.backward(model(next(reading)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(arguments: argparse.Namespace) -> None:
    """Time the settings in turns, on every rank."""
    torch.set_num_threads(1)
    steps = {name: training_step(tracking) for name, tracking in SETTINGS.items()}
    turns = {name: repeated(step, times=STEPS, before=dist.barrier) for name, step in steps.items()}
    measured = take_turns(turns, rounds=arguments.rounds, shown=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        table = Table(title="One step on two ranks of DDP", unit="us", measured=measured)
        report("throughput", [table], arguments)


if __name__ == "__main__":
    on_two_ranks(__doc__, measure, rounds=21)
