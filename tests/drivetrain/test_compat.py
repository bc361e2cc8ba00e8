"""Each private name of torch is what the umbrella relies on: these tests tell when a new torch changes one."""

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from drivetrain.compat import milestones_of, schedulers_in


def optimizer() -> SGD:
    return SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_a_sequence_tells_its_schedulers_and_when_it_goes_on() -> None:
    stepped = optimizer()
    parts = [LinearLR(stepped), ConstantLR(stepped), CosineAnnealingLR(stepped, T_max=5)]
    sequence = SequentialLR(stepped, parts, milestones=[2, 4])
    assert list(schedulers_in(sequence)) == parts
    assert list(milestones_of(sequence)) == [2, 4]


def test_a_chain_tells_its_schedulers_which_all_run_from_the_start() -> None:
    stepped = optimizer()
    parts = [LinearLR(stepped), ConstantLR(stepped)]
    chain = ChainedScheduler(parts, stepped)
    assert list(schedulers_in(chain)) == parts
    assert list(milestones_of(chain)) == []


def test_a_single_scheduler_has_neither() -> None:
    scheduler = LinearLR(optimizer())
    assert list(schedulers_in(scheduler)) == []
    assert list(milestones_of(scheduler)) == []
