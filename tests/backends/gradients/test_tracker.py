"""Gradients on their way to a step, by the table of `tracker.py`, with one model and with several."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from drivetrain_backends import AccumulationError, SingleBackend
from drivetrain_backends.gradients import tracker
from drivetrain_backends.gradients.tracker import GradientGroup
from drivetrain_precision import PrecisionSettings
from plain_loop.backends import Weight, prepare_sgd, step_and_clear
from plain_loop.backends import single as backend

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
    single, model, prepared = prepare_sgd(backend(on_nonfinite="skip"), Weight(), lr=1.0)
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


def two(single: SingleBackend, *, together: bool):
    """Two models, under one optimizer or under one each; the learning rate of 1 makes steps show gradients."""
    a, b = Weight(), Weight()
    optimizers = [SGD([a.w, b.w], lr=1.0)] if together else [SGD([a.w], lr=1.0), SGD([b.w], lr=1.0)]
    prepared = single.prepare([a, b], optimizers, [])
    return a, b, prepared, [o for one in prepared for o in one.optimizers]


SCALING = PrecisionSettings(initial_scale=1024.0)
MODES = pytest.mark.parametrize("mode", ["no", "fp16"])


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=1, max_size=4))
def test_sums_with_counts_become_the_mean_over_all_items(windows: list[list[int]]) -> None:
    single, model, prepared = prepare_sgd(backend(accumulation=4), Weight(), lr=1.0)
    for counts in windows:
        before = model.w.item()
        for i, count in enumerate(counts):
            single.window.begin(is_last=i + 1 == len(counts))
            prepared.backward(model(torch.tensor(3.0 * count)), count=count)
        step_and_clear(prepared)
        closed_early = len(counts) < 4 or single.window.closing
        assert closed_early
        assert before - model.w.item() == pytest.approx(3.0 if sum(counts) else 0.0, abs=1e-4)


@MODES
def test_a_counted_loss_through_two_models_of_one_optimizer_is_right_for_both(mode: str) -> None:
    single = backend(mode, accumulation=2, precision=SCALING)
    a, b, _, (optimizer,) = two(single, together=True)
    for count in (2, 8):
        single.window.begin()
        single.backward((a(torch.tensor(1.0)) + b(torch.tensor(1.0))).float() * 4 * count, count=count)
    optimizer.step()
    assert (1 - a.w.item(), 1 - b.w.item()) == (4.0, 4.0)


@MODES
def test_a_counted_loss_of_two_optimizers_names_both_models(mode: str) -> None:
    single = backend(mode, accumulation=2, precision=SCALING)
    a, b, prepared, optimizers = two(single, together=False)
    for count in (2, 8):
        single.window.begin()
        loss = (a(torch.tensor(1.0)) + b(torch.tensor(1.0))).float() * 4 * count
        single.backward_of(prepared, loss, count=count)
    for optimizer in optimizers:
        optimizer.step()
    assert (1 - a.w.item(), 1 - b.w.item()) == (4.0, 4.0)


def test_a_counted_loss_said_to_be_one_models_does_not_step_another() -> None:
    single = backend()
    a, b, prepared, optimizers = two(single, together=False)
    single.window.begin()
    prepared[0].backward(a(torch.tensor(1.0)) + b(torch.tensor(1.0)), count=2)
    optimizers[0].step()
    with pytest.raises(AccumulationError, match=r"pass every model a loss trains, backward\(\.\.\., model="):
        optimizers[1].step()


@MODES
def test_clipping_one_model_between_two_backwards_leaves_it_as_it_is(mode: str) -> None:
    single = backend(mode, precision=SCALING)
    a, b, prepared, optimizers = two(single, together=False)
    single.window.begin()
    prepared[0].backward(a(torch.tensor(1.0)).float())
    prepared[0].clip(norm=100.0)
    prepared[1].backward(b(torch.tensor(1.0)).float())
    for optimizer in optimizers:
        optimizer.step()
    assert (1 - a.w.item(), 1 - b.w.item()) == (1.0, 1.0)


@MODES
@pytest.mark.parametrize("together", [True, False])
def test_clipping_over_two_models_sees_final_gradients_alone(mode: str, together: bool) -> None:
    single = backend(mode, precision=SCALING)
    a, b, prepared, _ = two(single, together=together)
    single.window.begin()
    single.backward((a(torch.tensor(3.0)) + b(torch.tensor(4.0))).float())
    norm = prepared[0].clip([a.w, b.w], norm=100.0)
    assert norm is not None
    assert norm.item() == 5.0


@MODES
def test_a_parameter_of_two_models_is_corrected_once(mode: str) -> None:
    single = backend(mode, accumulation=4, precision=SCALING)
    a, b = Weight(), Weight()
    b.w = a.w
    (prepared, _) = single.prepare([a, b], [SGD([a.w], lr=1.0)], [])
    single.window.begin(is_last=True)
    single.backward((a(torch.tensor(1.0)) + b(torch.tensor(1.0))).float())
    prepared.optimizers[0].step()
    assert 1 - a.w.item() == 2.0


def test_an_overflow_skips_the_model_that_overflowed_whatever_the_order() -> None:
    for first in (0, 1):
        single = backend("fp16", precision=SCALING)
        a, b, prepared, optimizers = two(single, together=False)
        single.window.begin()
        prepared[0].backward(a(torch.tensor(1.0)).float() * float("inf"))
        prepared[1].backward(b(torch.tensor(1.0)).float())
        for i in (first, 1 - first):
            optimizers[i].step()
        assert [o.was_skipped for o in optimizers] == [True, False]
        assert 1 - b.w.item() == 1.0


def test_a_save_right_after_an_overflow_keeps_it() -> None:
    single, model, prepared = prepare_sgd(backend("fp16", precision=SCALING), Weight(), lr=1.0)
    single.window.begin()
    prepared.backward(model(torch.tensor(1.0)).float() * float("inf"))
    prepared.optimizers[0].step()
    assert single.state_dict()["scaler"]["scale"] == 512.0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_gradients_are_unscaled_too() -> None:
    single = backend("fp16", precision=SCALING)
    model = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(model.weight)
    (prepared,) = single.prepare([model], [SGD(model.parameters(), lr=1.0)], [])
    single.window.begin()
    prepared.backward(model(torch.tensor([1, 1])).float().sum())
    prepared.optimizers[0].step()
    assert model.weight[1].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(("mode", "accumulation"), [("no", 2), ("fp16", 1)])
def test_gradients_of_a_plain_backward_are_refused_where_they_would_be_wrong(
    mode: str, accumulation: int
) -> None:
    single = backend(mode, accumulation=accumulation, precision=SCALING)
    a, _, _, (optimizer, _) = two(single, together=False)
    for number in range(accumulation):
        single.window.begin(is_last=number + 1 == accumulation)
        a(torch.tensor(3.0)).backward()
    with pytest.raises(AccumulationError, match=r"gradients of loss.backward\(\), which are neither divided"):
        optimizer.step()


def test_a_plain_backward_is_right_where_nothing_is_divided_or_scaled() -> None:
    single = backend()
    a, _, _, (optimizer, _) = two(single, together=False)
    a(torch.tensor(3.0)).backward()
    optimizer.step()
    assert a.w.item() == -2.0


@pytest.mark.parametrize("mode", ["no", "fp16"])
@pytest.mark.parametrize("counted", [False, True])
def test_gradients_that_a_step_used_are_not_normalised_again(mode: str, counted: bool) -> None:
    single, model, prepared = prepare_sgd(backend(mode, precision=SCALING), Weight(), lr=1.0)
    for step in (1, 2):
        single.window.begin()
        loss = model(torch.tensor(3.0 * 2**counted)).float()
        if step == 2 and (counted or mode == "fp16"):
            with pytest.raises(AccumulationError, match="adds to gradients of Weight that a step has used"):
                prepared.backward(loss, count=2 if counted else None)
            break
        prepared.backward(loss, count=2 if counted else None)
        prepared.optimizers[0].step()
        assert 1 - model.w.item() == {1: 3.0, 2: 9.0}[step]  # summed on purpose, as in a plain loop


def test_a_window_that_closes_early_does_not_rescale_gradients_that_a_step_used() -> None:
    single, model, prepared = prepare_sgd(backend(accumulation=2), Weight(), lr=1.0)
    for length in (2, 1):
        for number in range(length):
            single.window.begin(is_last=number + 1 == length)
            prepared.backward(model(torch.tensor(3.0)))
        if length == 2:
            prepared.optimizers[0].step()
    with pytest.raises(AccumulationError, match="a loss of a window that closed early adds to gradients"):
        prepared.optimizers[0].step()


@MODES
@pytest.mark.parametrize(("keeps", "moved"), [(False, 2.0), (True, 0.5)])
def test_a_window_that_closes_early_may_keep_the_divisor_of_a_full_one(
    mode: str, keeps: bool, moved: float
) -> None:
    single = backend(mode, accumulation=4, precision=SCALING)
    single.window.keeps_divisor = keeps
    model = Weight()
    (prepared,) = single.prepare([model], [SGD([model.w], lr=1.0)], [])
    single.window.begin(is_last=True)
    prepared.backward(model(torch.tensor(2.0)).float())
    prepared.optimizers[0].step()
    assert 1 - model.w.item() == moved


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_the_model_cleared_itself_are_not_in_the_way(set_to_none: bool) -> None:
    single, model, prepared = prepare_sgd(backend(), Weight(), lr=1.0)
    for _ in range(2):
        single.window.begin()
        prepared.backward(model(torch.tensor(6.0)), count=2)
        prepared.optimizers[0].step()
        model.zero_grad(set_to_none=set_to_none)
    assert 1 - model.w.item() == 6.0
