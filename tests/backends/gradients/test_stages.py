"""The stages of gradients follow the table of `tracker.py`, and what a step needs is told by frozen values."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD

from backends.replicas import prepare_sgd
from drivetrain_backends import AccumulationError, SingleBackend
from drivetrain_backends.gradients import tracker
from drivetrain_backends.gradients.tracker import GradientGroup
from single_process import Weight, backend

STAGES = ("empty", "open", "final", "used")
TABLE = {  # stage: the stage after add_loss, finish, use and clear
    "empty": ("open", "empty", "used", "empty"),
    "open": ("open", "final", None, "empty"),
    "final": ("open", "final", "used", "empty"),
    "used": ("open", "used", "used", "empty"),
}


def group_in(stage: str, single: SingleBackend) -> GradientGroup:
    """Gradients that went through the stages up to one, in a window that is followed by another."""
    model = Weight()
    (prepared,) = single.prepare([model], [SGD([model.w], lr=1.0)], [])
    single.window.begin()
    if stage != "empty":
        prepared.backward(model(torch.tensor(2.0)))
    if stage in ("final", "used"):
        prepared.group.finish()
    if stage == "used":
        prepared.group.use()
    single.window.begin()
    return prepared.group


EVENTS: tuple[Callable[[GradientGroup], None], ...] = (
    lambda group: group.add_loss(None),
    GradientGroup.finish,
    GradientGroup.use,
    lambda group: group.clear(*group.optimizers),
)


@pytest.mark.parametrize("stage", STAGES)
def test_events_lead_from_stage_to_stage_as_the_table_says(stage: str) -> None:
    for event, after in zip(EVENTS, TABLE[stage], strict=True):
        if after is not None:
            single = backend()  # which holds the optimizer
            group = group_in(stage, single)
            assert group.stage == stage
            event(group)
            assert group.stage == after


def test_the_docstring_has_the_same_table() -> None:
    rows = [
        line.strip("|").split("|") for line in (tracker.__doc__ or "").splitlines() if line.startswith("| ")
    ]
    told = {row[0].strip(): [cell.strip().split(",")[0] for cell in row[1:]] for row in rows[1:]}
    assert told == {stage: [after or "-" for after in row] for stage, row in TABLE.items()}


def test_a_loss_in_the_window_of_final_gradients_is_refused() -> None:
    single, model, prepared = prepare_sgd(backend(), Weight(), lr=1.0)
    single.window.begin()
    prepared.backward(model(torch.tensor(2.0)))
    prepared.clip(norm=math.inf)
    with pytest.raises(AccumulationError, match="they are final; clip after its last loss"):
        prepared.group.add_loss(None)
    assert prepared.group.stage == "final"


def test_the_losses_of_a_window_are_added_up_and_the_next_window_begins_anew() -> None:
    single, model, prepared = prepare_sgd(backend(accumulation=2), Weight(), lr=1.0)
    for count in (3, 5):
        single.window.begin()
        prepared.backward(model(torch.tensor(2.0)), count=count)
    held = prepared.group.losses
    assert (prepared.group.last_window, held.is_counted, held.num_items, held.adds_to_used) == (
        1,
        True,
        8,
        False,
    )
    prepared.optimizers[0].step()
    assert prepared.group.losses is held
    prepared.optimizers[0].zero_grad()
    single.window.begin()
    prepared.backward(model(torch.tensor(2.0)), count=7)
    assert (prepared.group.last_window, prepared.group.losses.num_items) == (2, 7)


def test_the_norm_and_an_overflow_are_told_until_the_next_loss() -> None:
    single, model, prepared = prepare_sgd(backend(nonfinite_gradients="skip"), Weight(), lr=1.0)
    single.window.begin()
    prepared.backward(model(torch.tensor(math.inf)))
    prepared.clip(norm=1.0)
    assert prepared.group.final.overflowed
    assert prepared.group.final.norm is not None
    prepared.optimizers[0].step()
    assert prepared.optimizers[0].was_skipped
    prepared.optimizers[0].zero_grad()
    single.window.begin()
    prepared.backward(model(torch.tensor(2.0)))
    assert prepared.group.final == tracker.FinalGradients()
