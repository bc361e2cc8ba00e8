"""`train_step` under DeepSpeed, whose engine owns backward, clipping and step."""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator


def trained(*, in_one_call: bool) -> list[float]:
    """The weights after two windows of two micro-batches, clipped."""
    torch.manual_seed(0)
    sections = {"deepspeed": {"stage": 2}, "run": {"show_plan": False}}
    with Accelerator(
        backend="deepspeed", cpu=True, gradient_accumulation_steps=2, sections=sections
    ) as accelerator:
        model = nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for number in range(4):
            batch = torch.full((2, 4), number + 1.0)
            if in_one_call:
                result = accelerator.train_step(batch, loss=lambda m, b: m(b).square().mean(), max_norm=1.0)
                assert result.stepped is (number % 2 == 1)
                continue
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.get_state_dict(model)["weight"].flatten().tolist()


@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.ranks(1)
def test_one_call_trains_as_the_loop() -> None:
    assert trained(in_one_call=True) == trained(in_one_call=False)
