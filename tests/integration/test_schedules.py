"""Schedules whose scheduler was not prepared, or that count something else than optimizer steps."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
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
from torch.utils.data import DataLoader

from drivetrain_backends import SchedulerError
from logged_messages import messages_of
from plain_loop.accelerated import ON_TWO, accelerator_of


@pytest.mark.parametrize("over_prepared", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize(
    "backend", ["single", *(pytest.param(b, marks=[pytest.mark.slow, ON_TWO]) for b in ("ddp", "fsdp"))]
)
def test_a_scheduler_left_out_is_refused_before_a_wrong_step(
    backend: str, guarded: bool, over_prepared: bool
) -> None:
    """Made before or after prepare(), over either optimizer; the step with or without a guard."""
    with accelerator_of(backend, gradient_accumulation_steps=2) as accelerator:
        model = nn.Linear(4, 1)
        own = SGD(model.parameters(), lr=0.1)
        scheduler = None if over_prepared else StepLR(own, 1, 0.5)
        model, optimizer = accelerator.prepare(model, own)
        scheduler = scheduler or StepLR(optimizer, 1, 0.5)

        def micro_batch() -> None:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).mean())
                if not guarded or accelerator.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
                with warnings.catch_warnings(action="ignore"):  # torch sees that none was stepped before
                    scheduler.step()

        micro_batch()
        said = r"changed inside an accumulation window, from 0\.1 to 0\.05"
        with pytest.raises(SchedulerError, match=said):
            micro_batch()
        assert optimizer.num_steps == 0


@pytest.mark.parametrize("make", [partial(StepLR, step_size=4), ReduceLROnPlateau])
@pytest.mark.parametrize("over_prepared", [False, True])
def test_a_scheduler_left_out_is_refused_though_its_rate_stays(make: Callable, over_prepared: bool) -> None:
    # Rates that change where windows begin, or never, tell nothing.
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    model = nn.Linear(4, 1)
    own = SGD(model.parameters(), lr=0.1)
    scheduler = None if over_prepared else make(own)
    model, optimizer = accelerator.prepare(model, own)
    scheduler = scheduler or make(optimizer)
    vars(scheduler)  # as state_dict() does
    metric = () if isinstance(scheduler, StepLR) else (1.0,)

    def micro_batch() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            with warnings.catch_warnings(action="ignore"):
                scheduler.step(*metric)
            optimizer.zero_grad()

    micro_batch()
    with pytest.raises(SchedulerError, match="schedule of SGD advanced inside an accumulation window"):
        micro_batch()
    assert optimizer.num_steps == 0


def test_a_scheduler_of_the_users_own_may_be_stepped_with_the_optimizer_or_once_an_epoch() -> None:
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=1.0))
    by_step, by_epoch = StepLR(optimizer, 1, 0.5), StepLR(optimizer, 1, 0.1)
    for _ in range(2):
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).mean())
                optimizer.step()
                if accelerator.sync_gradients:
                    by_step.step()
                optimizer.zero_grad()
        by_epoch.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5**4 * 0.1**2)


def test_an_epochs_prepared_scheduler_may_step_while_a_window_is_open() -> None:
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = nn.Linear(4, 1)
    own = SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, own, StepLR(own, 1, 0.5))
    for _ in range(2):
        for _ in range(3):  # of a loader that was not prepared
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).mean())
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    assert optimizer.num_steps == 3
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_schedule_is_wound_forward_before_training_as_in_torch(accumulation: int) -> None:
    accelerator = accelerator_of(gradient_accumulation_steps=accumulation)
    model = nn.Linear(4, 1)
    own = SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, own, StepLR(own, 1, 0.5))
    with pytest.warns(UserWarning, match=r"Detected call of `lr_scheduler.step\(\)` before"):
        scheduler.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    for _ in range(accumulation):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            scheduler.step()
            scheduler.step()  # moves nothing until the optimizer has
            optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.125


def warmed_up(optimizer: SGD, total: int) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, total - 2)]
    return SequentialLR(optimizer, parts, milestones=[2])


def as_transformers(optimizer: SGD, total: int) -> LambdaLR:
    def rate(step: int, *, num_training_steps: int) -> float:
        return max(0.0, 1 - step / num_training_steps)

    return LambdaLR(optimizer, partial(rate, num_training_steps=total))


def decayed(optimizer: SGD, total: int) -> LinearLR:
    return LinearLR(optimizer, 1.0, 0.0, total_iters=total)


def cycled(optimizer: SGD, total: int) -> OneCycleLR:
    return OneCycleLR(optimizer, 1.0, total_steps=total)


TOTALS: list[Callable[[SGD, int], LRScheduler]] = [decayed, cycled, warmed_up, as_transformers]


# The prepare calls, and the schedule's length in batches of the loader: before it was prepared, or after.
TOGETHER, SCHEDULER_FIRST, LOADER_FIRST, ALONE = "together", "scheduler first", "loader first", "loader alone"
ORDERS = (TOGETHER, SCHEDULER_FIRST, LOADER_FIRST, ALONE)


LOGGER = "drivetrain.prepare.schedule_length"


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("order", "make"),
    [*((order, decayed) for order in ORDERS), *((LOADER_FIRST, make) for make in TOTALS[1:])],
)
def test_a_schedule_of_the_unprepared_loaders_length_is_told_on_rank_0_at_prepare(
    order: str, make: Callable[[SGD, int], LRScheduler]
) -> None:
    """Schedules of twice the loader's own length."""
    with messages_of(LOGGER) as told, accelerator_of(gradient_accumulation_steps=2) as accelerator:
        model = nn.Linear(4, 1)
        optimizer = SGD(model.parameters(), lr=1.0)
        loader = DataLoader(torch.ones(64, 4), batch_size=4)
        scheduler = make(optimizer, 2 * len(loader))
        if order == TOGETHER:
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        elif order == SCHEDULER_FIRST:
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
            loader = accelerator.prepare(loader)
        elif order == LOADER_FIRST:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            scheduler = accelerator.prepare(scheduler)
        else:
            loader = accelerator.prepare(loader)
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        told.append("prepared")
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        rank = accelerator.process_index
    if rank:
        assert told == ["prepared"]
        return
    at_prepare, prepared, at_end = told
    assert "is made for 32 steps, which fits the loader's 16 batches before prepare()" in at_prepare
    assert "each rank has 8 batches and an epoch has 4 optimizer steps" in at_prepare
    assert "the schedule spans 8 epochs. Unless this is intended, prepare the loader first" in at_prepare
    assert prepared == "prepared"
    assert "of a schedule of 32" in at_end


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_length", [True, False])
def test_a_schedule_made_for_the_prepared_loader_is_not_told_of(by_length: bool) -> None:
    """Of as many steps as two epochs of the unprepared one."""
    with messages_of(LOGGER) as told, accelerator_of() as accelerator:
        loader = accelerator.prepare(DataLoader(torch.ones(64, 4), batch_size=4))
        steps = 4 * len(loader) if by_length else accelerator.num_steps(loader, epochs=4)
        model = nn.Linear(4, 1)
        own = SGD(model.parameters(), lr=1.0)
        accelerator.prepare(model, own, CosineAnnealingLR(own, steps))
        accelerator.prepare(DataLoader(torch.ones(32, 4), batch_size=4))
        assert steps == 32
    assert told == []


def test_steps_are_counted_with_an_accumulation_that_was_just_set() -> None:
    with accelerator_of() as accelerator:
        loader = accelerator.prepare(DataLoader(torch.arange(32.0), batch_size=2))
        assert accelerator.num_steps(loader, epochs=3) == 48
        accelerator.gradient_accumulation_steps = 4
        assert accelerator.num_steps(loader, epochs=3) == 12


def test_a_schedule_that_an_error_cuts_short_is_not_told(caplog) -> None:
    for error in (None, KeyError):
        with pytest.raises(KeyError) if error else nullcontext():
            with accelerator_of() as accelerator:
                model = nn.Linear(4, 1)
                own = SGD(model.parameters(), lr=1.0)
                model, optimizer, scheduler = accelerator.prepare(model, own, LinearLR(own, total_iters=9))
                accelerator.backward(model(torch.ones(2, 4)).mean())
                optimizer.step()
                scheduler.step()
                if error:
                    raise error
        assert ("ended at step 1 of a schedule of 9 (LinearLR)" in caplog.text) is (error is None)
        caplog.clear()


def test_steps_are_counted_in_epochs_and_samples() -> None:
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    plain = DataLoader(torch.randn(100, 4), batch_size=10)
    loader = accelerator.prepare(plain)
    assert accelerator.num_steps(loader, epochs=1) == 3
    assert accelerator.num_steps(loader, epochs=3) == 9
    assert accelerator.num_steps(loader, epochs=1.5) == 3 + 2
    assert accelerator.num_steps(loader, samples=100) == 3
    assert accelerator.num_steps(loader, samples=150) == 3 + 2
    uneven = accelerator.prepare(DataLoader(torch.randn(100, 4), batch_size=16))
    accelerator.gradient_accumulation_steps = 1
    assert [accelerator.num_steps(uneven, samples=n) for n in (16, 17, 96, 97, 116)] == [1, 2, 6, 7, 8]
    with pytest.raises(
        TypeError, match=r"num_steps\(DataLoader\): pass the loader that prepare\(\) returned"
    ):
        accelerator.num_steps(plain, epochs=1)
    with pytest.raises(TypeError, match="give one of the two"):
        accelerator.num_steps(loader)
    with pytest.raises(ValueError, match="must be above 0"):
        accelerator.num_steps(loader, epochs=0)
