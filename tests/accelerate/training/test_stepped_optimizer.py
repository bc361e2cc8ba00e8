"""Copies and pickles of prepared optimizers and schedulers, beside the real Accelerate."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate_sides import on_sides

pytest.importorskip("accelerate")


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def stored(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def twins_of(accelerator: Any, duplicate: Callable[[Any], Any]) -> list[Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    schedule.step()
    twin, its_schedule = duplicate((optimizer, schedule))
    kinds = [type(each).__name__ for each in (twin, twin.optimizer, its_schedule, its_schedule.scheduler)]
    assert its_schedule.optimizers[0] is twin
    assert its_schedule.scheduler.optimizer is twin.optimizer
    states = [str(twin.state_dict()), its_schedule.get_last_lr()]
    parameters = twin.param_groups[0]["params"]
    for each in parameters:
        each.grad = torch.ones_like(each)
    twin.step()
    its_schedule.step()
    twin.zero_grad()
    shallow = copy.copy(optimizer)
    own = shallow.optimizer is optimizer.optimizer, type(shallow) is type(optimizer)
    return [kinds, *states, its_schedule.get_last_lr(), [each.item() for each in parameters], own]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, stored])
def test_a_copy_or_pickle_is_a_prepared_one_of_its_own(duplicate: Callable[[Any], Any]) -> None:
    theirs, ours = on_sides(lambda accelerator: twins_of(accelerator, duplicate))
    assert theirs == ours
    assert ours[0] == ["AcceleratedOptimizer", "AdamW", "AcceleratedScheduler", "StepLR"]
