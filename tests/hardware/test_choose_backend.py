"""The planner on a device: what it predicts is what the device's allocator holds."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from hardware.devices import here, runs_on_device
from planned_models import Perceptron

NUM_STEPS = 7


def measured(room: int, folder: Path) -> tuple[str, int]:
    """Train by the best plan in so much room beside the model; return it, and by how many percent it was off."""
    width = 256 * here().scale
    torch.manual_seed(0)
    model: nn.Module = Perceptron(width)
    data = TensorDataset(torch.ones(NUM_STEPS * 2 * 8, width))
    free = patch("drivetrain_plan.detected._free", lambda *_: room)
    cache = patch("drivetrain_plan.detected.default_cache", lambda: folder / "rates.json")
    with free, cache, Accelerator(backend="auto", sections={"run": {"show_plan": False}}) as accelerator:
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
        for (batch,) in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        facts = accelerator.plan.facts
        if not accelerator.is_main_process:
            return facts["plan"], 0
    found = re.search(r"memory .*, predicted .* \(([-+]\d+)%\)", facts["measured"])
    assert found is not None, facts
    return facts["plan"], int(found[1])


@runs_on_device()
@pytest.mark.slow
def test_the_memory_of_one_device_is_predicted(tmp_path: Path) -> None:
    plan, percent = measured(2**33, tmp_path)
    assert plan.startswith("one device; ")
    assert abs(percent) <= 5, plan


@pytest.mark.slow
@runs_on_device(2)
def test_the_memory_of_replicas_and_of_shards_is_predicted(tmp_path: Path) -> None:
    plan, percent = measured(2**33, tmp_path)
    assert plan.startswith("DDP 2; ")
    assert abs(percent) <= 5, plan
    weights = 4 * sum(p.numel() for p in Perceptron(256 * here().scale).parameters())
    plan, percent = measured(3 * weights, tmp_path)
    assert plan.startswith("FSDP "), plan
    assert abs(percent) <= 5, plan
