"""Two Accelerators of one program share its processes and nothing else."""

import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator


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


def weights_of(together: bool) -> list[list[float]]:
    kinds = [("no", 1), ("bf16", 2)]
    found = []
    if together:
        runs = [prepared(*kind) for kind in kinds]
        for micro_batch in range(4):
            for run in runs:
                train(*run, micro_batch)
        found = [next(model.parameters()).flatten().tolist() for _, model, _ in runs]
    else:
        for kind in kinds:
            run = prepared(*kind)
            for micro_batch in range(4):
                train(*run, micro_batch)
            found.append(next(run[1].parameters()).flatten().tolist())
    return found


def test_each_trains_as_if_it_were_alone(run_ranks) -> None:
    together = run_ranks(weights_of, True)
    assert together == run_ranks(weights_of, False)
    assert together[0] == together[1]
    assert together[0][0] != together[0][1]


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
