"""Schedules count optimizer steps, and nothing else."""

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from drivetrain_backends import SchedulerError, SingleBackend
from drivetrain_backends.composed.prepared import ComposedPrepared
from drivetrain_backends.optim.schedule_guard import ScheduleGuard
from plain_loop.backends import linear, prepare_sgd
from plain_loop.backends import single as backend
from tuples_on_threads import tuples_on_threads


def sequence(optimizer: SGD) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, 1.0, total_iters=3), LambdaLR(optimizer, lambda step: 0.9**step)]
    return SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=8),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=9),
    "sequence": sequence,
}


def micro_batch(single: SingleBackend, prepared: ComposedPrepared, *metrics: float) -> None:
    single.window.begin()
    prepared.backward(prepared.model(torch.ones(1, 2)).sum())
    prepared.optimizers[0].step()
    prepared.schedulers[0].step(*metrics)
    prepared.optimizers[0].zero_grad()


def plain_rates(build, steps: int) -> list[float]:
    model = linear()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler: LRScheduler = build(optimizer)
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("kind", SCHEDULES)
def test_an_accumulated_run_sees_the_rates_of_a_plain_loop(kind: str) -> None:
    model, single = linear(), backend(accumulation=4)
    optimizer = SGD(model.parameters(), lr=1.0)
    (prepared,) = single.prepare([model], [optimizer], [SCHEDULES[kind](optimizer)])
    rates = []
    for _ in range(8):
        for _ in range(4):
            micro_batch(single, prepared)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == plain_rates(SCHEDULES[kind], 8)
    assert len(set(rates)) > 4


def test_a_metric_is_handed_on() -> None:
    model, single = linear(), backend()
    optimizer = SGD(model.parameters(), lr=1.0)
    (prepared,) = single.prepare([model], [optimizer], [ReduceLROnPlateau(optimizer, factor=0.5, patience=0)])
    for metric in (1.0, 2.0, 3.0):
        micro_batch(single, prepared, metric)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert prepared.schedulers[0].best == 1.0  # what the user's scheduler has can be read


def test_skipped_steps_do_not_advance_the_scheduler() -> None:
    model, single = linear(), backend("fp16")
    optimizer = SGD(model.parameters(), lr=1.0)
    (prepared,) = single.prepare([model], [optimizer], [StepLR(optimizer, 1, gamma=0.5)])
    for factor in (float("inf"), 1.0, float("nan"), 1.0):
        prepared.backward(model(torch.ones(1, 2)).float().sum() * factor)
        prepared.optimizers[0].step()
        prepared.schedulers[0].step()
        prepared.optimizers[0].zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_scheduler_built_on_the_prepared_optimizer_works() -> None:
    single, model, prepared = prepare_sgd(backend(), linear(), lr=1.0)
    scheduler = StepLR(prepared.optimizers[0], 1, gamma=0.5)
    (prepared,) = single.prepare([], [], [scheduler])
    prepared.backward(model(torch.ones(1, 2)).sum())
    prepared.optimizers[0].step()
    prepared.schedulers[0].step()
    assert prepared.optimizers[0].param_groups[0]["lr"] == 0.5


def test_a_resume_between_step_and_schedule_loses_neither() -> None:
    def start() -> tuple[SingleBackend, ComposedPrepared]:
        model, single = linear(), backend()
        optimizer = SGD(model.parameters(), lr=1.0)
        (prepared,) = single.prepare([model], [optimizer], [StepLR(optimizer, 1, gamma=0.5)])
        return single, prepared

    single, prepared = start()
    micro_batch(single, prepared)
    prepared.backward(prepared.model(torch.ones(1, 2)).sum())
    prepared.optimizers[0].step()
    state = prepared.state_dict()  # saved before scheduler.step()
    _, resumed = start()
    resumed.load_state_dict(state)
    assert resumed.schedulers[0].lag == 1
    resumed.schedulers[0].step()
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.25
    resumed.schedulers[0].step()
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.25


def test_a_schedule_left_out_is_looked_for_while_other_threads_make_tuples() -> None:
    optimizer = SGD(linear().parameters(), lr=1.0)
    schedule = StepLR(optimizer, step_size=100)
    with tuples_on_threads() as failures:
        for _ in range(20):
            guard = ScheduleGuard(optimizer)
            guard.begin(optimizer.param_groups)
    assert not failures
    optimizer.step()
    schedule.step()
    with pytest.raises(SchedulerError, match="the learning-rate schedule of SGD advanced"):
        guard.check(optimizer)
