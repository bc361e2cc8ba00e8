"""The length of a schedule: what states it, what is told past it, and what a resume makes of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from drivetrain_backends import PreparedOptimizer, PreparedScheduler
from drivetrain_backends.optim.schedule_total import end_of, total_of
from plain_loop.backends import linear
from plain_loop.backends import single as backend

Make = Callable[[SGD, int], Any]


def decay(optimizer: SGD, total: int) -> LinearLR:
    return LinearLR(optimizer, 1.0, 0.0, total_iters=total)


def sequence(optimizer: SGD, total: int) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, total - 2)]
    return SequentialLR(optimizer, parts, milestones=[2])


def chain(optimizer: SGD, total: int) -> ChainedScheduler:
    parts = [ConstantLR(optimizer, 0.5, total_iters=2), PolynomialLR(optimizer, total_iters=total)]
    return ChainedScheduler(parts, optimizer)


def rate_of_transformers(step: int, *, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps)


def as_transformers(optimizer: SGD, total: int) -> LambdaLR:
    return LambdaLR(optimizer, partial(rate_of_transformers, num_training_steps=total))


def as_diffusers(optimizer: SGD, num_training_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_training_steps))


def in_three_stages(optimizer: SGD, total: int) -> LambdaLR:
    def rate(step: int, *, num_warmup_steps: int, num_stable_steps: int, num_decay_steps: int) -> float:
        return max(0.0, (num_warmup_steps + num_stable_steps + num_decay_steps - step) / 10)

    stages = {"num_warmup_steps": 1, "num_stable_steps": 1, "num_decay_steps": total - 2}
    return LambdaLR(optimizer, partial(rate, **stages))


ENDING: dict[str, Make] = {
    "cosine": CosineAnnealingLR,
    "linear": decay,
    "polynomial": lambda optimizer, total: PolynomialLR(optimizer, total_iters=total),
    "sequence": sequence,
    "chain": chain,
    "transformers": as_transformers,
    "diffusers": as_diffusers,
    "three stages": in_three_stages,
}
CYCLE: Make = lambda optimizer, total: OneCycleLR(optimizer, 1.0, total_steps=total)  # noqa: E731

ENDLESS: dict[str, Callable[[SGD], Any]] = {
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 3),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 0.1, 1.0, step_size_up=2),
    "warm-up": lambda optimizer: LinearLR(optimizer, 0.1, total_iters=3),
    "constant at first": lambda optimizer: ConstantLR(optimizer, 0.5, total_iters=3),
    "warm-up in a chain": lambda optimizer: ChainedScheduler(
        [LinearLR(optimizer, 0.1, total_iters=3), ExponentialLR(optimizer, 0.9)], optimizer
    ),
    "goes on for ever": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), StepLR(optimizer, 2)], milestones=[3]
    ),
    "function": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
}


def prepared(make: Callable[[SGD], Any]) -> tuple[PreparedOptimizer, PreparedScheduler, Callable[[], None]]:
    """An optimizer and its scheduler, and a function that trains a step."""
    model, single = linear(), backend()
    optimizer = SGD(model.parameters(), lr=1.0)
    (one,) = single.prepare([model], [optimizer], [make(optimizer)])

    def train() -> None:
        single.window.begin()
        one.backward(one.model(torch.ones(1, 2)).sum())
        one.optimizers[0].step()
        one.schedulers[0].step()
        one.optimizers[0].zero_grad()

    return one.optimizers[0], one.schedulers[0], train


@pytest.mark.parametrize("kind", ENDING)
def test_a_schedule_past_its_end_is_told_once_at_the_step(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, scheduler, train = prepared(lambda own: ENDING[kind](own, 4))
    assert total_of(scheduler.scheduler) == end_of(scheduler.scheduler) == 4
    for step in range(1, 8):
        train()
        assert ("is made for 4 steps, and training goes on after them" in caplog.text) == (step > 4)
    assert caplog.text.count("training goes on") == 1


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_schedule_that_has_no_end_is_not_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    _, scheduler, train = prepared(ENDLESS[kind])
    assert end_of(scheduler.scheduler) is None
    for _ in range(9):
        train()
    assert caplog.text == ""


def test_one_cycle_ends_with_an_error_of_its_own() -> None:
    _, _, train = prepared(lambda own: CYCLE(own, 5))
    for _ in range(5):
        train()
    with pytest.raises(ValueError, match="Tried to step 6 times"):
        train()


def test_a_schedule_that_was_made_longer_meanwhile_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    _, scheduler, train = prepared(lambda own: CosineAnnealingLR(own, 4))
    for step in range(8):
        if step == 3:
            scheduler.scheduler.T_max = 8  # type: ignore[attr-defined]
        train()
    assert caplog.text == ""


@pytest.mark.parametrize("kind", [*ENDING, "cycle"])
@pytest.mark.parametrize("total", [4, 6, 12])
def test_a_resumed_schedule_has_the_length_that_the_program_made_it_for(
    kind: str, total: int, caplog: pytest.LogCaptureFixture
) -> None:
    make = {**ENDING, "cycle": CYCLE}[kind]
    _, saved, train = prepared(lambda own: make(own, 6))
    for _ in range(3):
        train()
    state = saved.state_dict()
    optimizer, resumed, train = prepared(lambda own: make(own, total))
    optimizer.load_state_dict(saved.scheduler.optimizer.state_dict())
    resumed.resume(state)
    assert resumed.get_last_lr() == saved.get_last_lr()
    assert total_of(resumed.scheduler) == total
    # transformers' lengths are no part of a state: the program's function always counts
    is_told = total != 6 and kind not in ("transformers", "diffusers", "three stages")
    assert (
        f"for {total} steps here, and for 6 in the checkpoint, where it stands at step 3" in caplog.text
    ) == is_told
    caplog.clear()
    for _ in range(total - 3 - (kind == "cycle")):
        train()
    assert caplog.text == ""
    if kind in ("cosine", "linear", "polynomial", "sequence", "chain", "transformers", "diffusers"):
        assert resumed.get_last_lr()[0] == pytest.approx(0, abs=1e-6)


def test_other_ranks_than_the_first_tell_nothing(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, made, train = prepared(lambda own: CosineAnnealingLR(own, 9))
    other = PreparedScheduler(CosineAnnealingLR(optimizer.optimizer, 4), optimizer, is_main=False)
    other.resume(made.state_dict())
    for _ in range(6):
        train()
        other.step()
    assert caplog.text == ""


def test_a_metric_drives_a_schedule_without_a_length() -> None:
    assert total_of(ReduceLROnPlateau(SGD(linear().parameters()))) is None
