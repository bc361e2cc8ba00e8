"""The stopwatch on the device: it never makes the host wait, and what it counts is the host's count."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain_throughput.device_clock import DeviceClock, make_clock
from hardware.devices import OnDevice, here

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
    with here().waits() as found:
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


def test_one_process_measures_without_waiting(on_device: OnDevice) -> None:
    assert on_device(train_and_measure, "single") == [([], 64, 16)]


def test_ranks_measure_without_waiting(on_device: OnDevice) -> None:
    assert on_device(train_and_measure, "ddp", num_processes=2) == [([], 64, 8)] * 2


def phases_of_ranks(num_micro_batches: int) -> dict[str, float]:
    """Train under DDP with the stopwatch on; the mean seconds of a step by phase."""
    accelerator = Accelerator(
        backend="ddp",
        gradient_accumulation_steps=num_micro_batches,
        sections={"tracking": {"throughput": True}, "run": {"show_plan": False}},
    )
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(4 * 2 * 8, 6))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    with here().waits() as found:
        for number, (x,) in enumerate(loader):
            if number == NUM_WARM * num_micro_batches:
                found.clear()
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert list(found) == [], list(found)
    torch.accelerator.synchronize()
    total = accelerator.total_throughput
    accelerator.end_training()
    assert total.num_steps == 8 // num_micro_batches
    return dict(total.phase_seconds)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_device_tells_the_time_of_each_phase_and_of_the_wait_inside_backward(
    on_device: OnDevice, num_micro_batches: int
) -> None:
    for seconds in on_device(phases_of_ranks, num_micro_batches, num_processes=2):
        assert isinstance(seconds, dict)
        for phase in ("data", "forward", "backward", "communication", "optimizer"):
            assert seconds[phase] > 0, (phase, seconds)
        assert seconds["checkpoint"] == 0


def moments_of_left_work() -> tuple[bool, bool, float]:
    """Time work that the device leaves for later; whether its end is known before and after a wait, and seconds."""
    accelerator = Accelerator()
    clock = make_clock(accelerator.device)
    assert isinstance(clock, DeviceClock)
    count = 4 * here().scale ** 6  # on a card a copy of milliseconds
    there, pinned = torch.ones(count, device=accelerator.device), torch.empty(count).pin_memory()
    start = clock.moment()
    pinned.copy_(there, non_blocking=True)
    end = clock.moment()
    known = clock.is_past(end)
    torch.accelerator.synchronize()
    assert pinned.sum().item() == count
    return known, clock.is_past(end), clock.seconds_between(start, end)


def test_moments_of_the_device_are_known_once_it_has_come_so_far(on_device: OnDevice) -> None:
    ((before, after, seconds),) = on_device(moments_of_left_work)
    assert (before, after) == (False, True)
    assert 0 < seconds < 60
