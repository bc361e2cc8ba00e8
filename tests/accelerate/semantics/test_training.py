"""Rows of the table "Where it differs" about accumulation, gradients and batches, on one process."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_sides import SIDES, Side

pytest.importorskip("accelerate")


@dataclass
class Sample:
    values: torch.Tensor


def weight_after_an_epoch(side: Side) -> float:
    """Return the weight after windows of two micro-batches and of one, whose gradients are -1 for each sample."""
    with side.accelerator(gradient_accumulation_steps=2) as accelerator:
        given = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(given.weight)
        ones: Any = torch.ones(3, 1)
        model, optimizer, loader = accelerator.prepare(
            given, torch.optim.SGD(given.parameters(), lr=1.0), DataLoader(ones)
        )
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(-model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
        return given.weight.item()


def test_early_window() -> None:
    """a window of accumulation that closes early"""
    theirs, ours, restored = map(weight_after_an_epoch, SIDES)
    assert theirs == restored == 1.5
    assert ours == 2.0


def test_unscale() -> None:
    """`unscale_gradients` under fp16"""
    for side in SIDES[1:]:
        with side.accelerator(mixed_precision="fp16") as accelerator:
            with pytest.raises(RuntimeError, match=r"unscaled by clip_grad_norm_"):
                accelerator.unscale_gradients()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="scales no loss on the CPU")
def test_the_real_one_unscales() -> None:
    """`unscale_gradients` under fp16"""
    accelerator = SIDES[0]("accelerate.Accelerator")(mixed_precision="fp16")
    given = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 1, device="cuda")).mean())
    assert given.weight.grad is not None
    scaled = given.weight.grad.item()
    accelerator.unscale_gradients(optimizer)
    assert given.weight.grad.item() < scaled
    accelerator.end_training()


def test_dataclasses() -> None:
    """`send_to_device` of dataclasses"""
    found: list[str] = []
    for side in SIDES:
        with side.entered():
            sent = side("accelerate.utils.send_to_device")({"a": Sample(torch.ones(1))}, "meta")
        found.append(sent["a"].values.device.type)
    assert found == ["cpu", "meta", "cpu"]
