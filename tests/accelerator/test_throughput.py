"""The stopwatch on the device: it never makes the host wait, and what it counts is the host's count."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerator import device
from drivetrain import Accelerator
from drivetrain.device_clock import make_clock
from drivetrain_tracking.throughput.phase_times import HostClock

NUM_WARM = 2


def train_and_measure(backend: str) -> tuple[list[str], float, int]:
    """Train with the stopwatch on; where the host waited, the samples counted, and the steps measured."""
    accelerator = Accelerator(
        backend=backend,
        sections={
            "tracking": {"throughput_every_steps": 2, "peak_flops": 1e12},
            "run": {"show_plan": False},
        },
    )
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(4 * 2 * 8, 6))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4, pin_memory=True)
    )
    with device.synchronisations() as found:
        for number, (x,) in enumerate(loader):
            if number == NUM_WARM + 1:  # the first gather asks for the ranks' hosts
                found.clear()
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        waits = list(found)
    torch.accelerator.synchronize()
    total = accelerator.total_throughput
    accelerator.end_training()
    assert total.samples_per_second is not None
    assert total.mfu is not None
    return waits, round(total.samples_per_second * total.seconds, 3), total.num_steps


def test_one_process_measures_without_waiting(on_accelerators: Callable[..., list[object]]) -> None:
    assert on_accelerators(train_and_measure, "single") == [([], 64, 16)]


def test_ranks_measure_without_waiting(on_accelerators: Callable[..., list[object]]) -> None:
    assert on_accelerators(train_and_measure, "ddp", num_processes=2) == [([], 64, 8)] * 2


def clock_in_use() -> str:
    accelerator = Accelerator()
    return type(make_clock(accelerator.device)).__name__


def test_a_device_whose_events_have_no_time_is_measured_by_the_hosts_clock(
    on_accelerators: Callable[..., list[object]],
) -> None:
    assert on_accelerators(clock_in_use) == [HostClock.__name__]
