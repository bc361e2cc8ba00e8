"""Two Accelerators of one program share its processes and nothing else."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator
from plain_loop.case import assert_same_on_all_ranks


def prepared(mode: str, accumulation: int):
    accelerator = Accelerator(
        cpu=True, mixed_precision=mode, gradient_accumulation_steps=accumulation, seed=0
    )
    model = nn.Linear(4, 1)
    return accelerator, *accelerator.prepare(model, SGD(model.parameters(), lr=0.1))


def train(accelerator: Accelerator, model: nn.Module, optimizer: SGD, micro_batch: int) -> None:
    x = torch.full((2, 4), 1.0 + micro_batch + accelerator.process_index)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_each_trains_as_if_it_were_alone() -> None:
    kinds = [("no", 1), ("bf16", 2)]
    together, alone = ([prepared(*kind) for kind in kinds] for _ in range(2))
    for micro_batch in range(4):
        for run in together:
            train(*run, micro_batch)
    for run in alone:
        for micro_batch in range(4):
            train(*run, micro_batch)
    found, expected = ([next(run[1].parameters()).detach() for run in runs] for runs in (together, alone))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert_same_on_all_ranks(found)
    assert not torch.equal(*found)


def test_the_one_that_made_the_group_is_ended_last(run_ranks_script) -> None:
    source = """
import torch
from drivetrain import Accelerator
from drivetrain_state import ConnectError
first, second = (Accelerator(cpu=True, sections={"state": {"watchdog": False}}) for _ in range(2))
third = Accelerator(cpu=True, sections={"state": {"watchdog": False}})
second.end_training()
assert first.reduce(torch.ones(1)).item() == 2
first.end_training()
try:
    third.reduce(torch.ones(1))
except ConnectError as error:
    print(error)
"""
    for done in run_ranks_script(source):
        assert done.returncode == 0, done
        assert "the first context or Accelerator to connect owns it" in done.stdout
