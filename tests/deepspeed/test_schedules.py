"""DeepSpeed's own schedules, whose length the backends read as they read torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD

from drivetrain_backends import PreparedScheduler
from drivetrain_backends.optim.schedule_total import end_of, position_of, total_of
from logged_messages import messages_of
from plain_loop.backends import linear, single, take_step

pytestmark = pytest.mark.ranks(1)
TOLD = "is made for 4 steps, and training goes on after them"


def prepared(make: Callable[[SGD], Any]) -> tuple[PreparedScheduler, Callable[[], None]]:
    """Return a scheduler, and a function that trains a step."""
    model = linear()
    optimizer = SGD(model.parameters(), lr=1.0)
    (one,) = single().prepare([model], [optimizer], [make(optimizer)])

    def train() -> None:
        take_step(one, one.model(torch.ones(1, 2)).sum())
        one.schedulers[0].step()

    return one.schedulers[0], train


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("warm_up", ["log", "linear"])
def test_a_schedule_past_its_end_is_told_once_also_after_a_resume(name: str, warm_up: str) -> None:
    from deepspeed.runtime import lr_schedules

    def make(own: SGD) -> Any:
        return getattr(lr_schedules, name)(own, 4, warmup_num_steps=2, warmup_type=warm_up)

    with messages_of("drivetrain_backends") as told:
        scheduler, train = prepared(make)
        assert total_of(scheduler.scheduler) == end_of(scheduler.scheduler) == 4
        for step in range(1, 4):
            train()
            assert position_of(scheduler.scheduler) == step
        resumed, train = prepared(make)
        resumed.resume(scheduler.state_dict())
        for step in range(4, 7):
            train()
            assert sum(TOLD in each for each in told) == (step > 4)


@pytest.mark.parametrize("kind", ["WarmupLR", "OneCycle"])
def test_schedules_without_an_end_are_not_told(kind: str) -> None:
    from deepspeed.runtime import lr_schedules

    def make(own: SGD) -> Any:
        if kind == "WarmupLR":
            return lr_schedules.WarmupLR(own, warmup_num_steps=2)
        return lr_schedules.OneCycle(own, 0.1, 1.0, cycle_first_step_size=2, cycle_momentum=False)

    with messages_of("drivetrain_backends") as told:
        scheduler, train = prepared(make)
        for _ in range(5):
            train()
    assert (end_of(scheduler.scheduler), position_of(scheduler.scheduler)) == (None, 5)
    assert not any("training goes on" in each for each in told)
