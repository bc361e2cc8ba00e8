"""Micro-batches that end in an exception, and windows that are left: nothing of them gets into a step."""

import pytest
import torch
from torch.optim import SGD

from drivetrain_backends import AccumulationError
from drivetrain_precision import PrecisionSettings
from plain_loop.backends import Weight, prepare_sgd, step_and_clear
from plain_loop.backends import single as backend

MODES = pytest.mark.parametrize("mode", ["no", "fp16"])
SCALING = PrecisionSettings(initial_scale=1024.0)


def start(accumulation: int, mode: str = "no"):
    """A model that is to move by the gradient of each step."""
    single, model, prepared = prepare_sgd(
        backend(mode, accumulation=accumulation, precision=SCALING), Weight(), lr=1.0
    )
    return single.window, model, prepared, prepared.optimizers[0]


def train(model: Weight, prepared, value: float) -> None:
    prepared.backward(model(torch.tensor(value)).float())


@MODES
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_what_a_failed_closing_micro_batch_left_is_dropped_by_zero_grad(mode: str, fails_in: str) -> None:
    window, model, prepared, optimizer = start(2, mode)
    window.begin()
    train(model, prepared, 8.0)
    window.begin()
    if fails_in == "backward":
        train(model, prepared, 16.0)
    window.fail()
    optimizer.zero_grad()
    for value in (2.0, 4.0):
        window.begin()
        train(model, prepared, value)
    optimizer.step()
    assert 1 - model.w.item() == 3.0


def test_a_micro_batch_that_failed_in_an_open_window_counts_as_one_without_gradient() -> None:
    window, model, prepared, optimizer = start(4)
    for value in (8.0, 16.0):
        window.begin()
        train(model, prepared, value)
    window.fail()
    optimizer.zero_grad()
    for value in (2.0, 4.0):
        window.begin()
        optimizer.zero_grad()  # a loop that zeroes first: what was gathered since stays
        train(model, prepared, value)
    optimizer.step()
    assert 1 - model.w.item() == (2.0 + 4.0) / 4


def test_counted_losses_are_of_the_items_that_remain() -> None:
    window, model, prepared, optimizer = start(2)
    window.begin()
    prepared.backward(model(torch.tensor(70.0)), count=7)
    window.fail()
    optimizer.zero_grad()
    window.begin()
    prepared.backward(model(torch.tensor(6.0)), count=2)
    optimizer.step()
    assert 1 - model.w.item() == pytest.approx(3.0)


@pytest.mark.parametrize("failed", [1, 2])
def test_a_step_is_refused_while_a_failed_micro_batch_was_not_dropped(failed: int) -> None:
    window, model, prepared, optimizer = start(2)
    for number in (1, 2):
        window.begin()
        train(model, prepared, 8.0)
        if number == failed:
            window.fail()
    if failed == 2:  # the next window adds to what the failed one left
        for _ in range(2):
            window.begin()
            train(model, prepared, 8.0)
    with pytest.raises(AccumulationError, match=r"ended in an exception.*Call optimizer.zero_grad\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):
        window.begin()
        train(model, prepared, 2.0)
    optimizer.step()
    assert 1 - model.w.item() == 2.0


def test_a_failed_micro_batch_that_left_nothing_is_in_no_later_windows_way() -> None:
    window, model, prepared, optimizer = start(1)
    for failed in (False, True, False):
        window.begin()
        if failed:
            window.fail()
            continue
        train(model, prepared, 2.0)
        optimizer.step()
        optimizer.zero_grad()
    assert 1 - model.w.item() == 4.0


def test_every_optimizer_of_a_model_drops_its_own() -> None:
    single = backend(accumulation=2)
    model = torch.nn.ModuleList([Weight(), Weight()])
    (prepared,) = single.prepare([model], [SGD([one.w], lr=1.0) for one in model], [])
    single.window.begin()
    prepared.backward(model[0](torch.tensor(8.0)) + model[1](torch.tensor(8.0)))
    single.window.fail()
    prepared.optimizers[0].zero_grad()
    single.window.begin()
    prepared.backward(model[0](torch.tensor(2.0)))
    with pytest.raises(AccumulationError, match="for every optimizer"):
        prepared.optimizers[1].step()


def test_closing_a_backend_leaves_the_open_window() -> None:
    single = backend(accumulation=4)
    for _ in range(2):
        model = Weight()
        (prepared,) = single.prepare([model], [SGD([model.w], lr=1.0)], [])
        moved = []
        for value in (1.0, 2.0, 3.0, 6.0, 5.0, 7.0):
            single.window.begin()
            train(model, prepared, value)
            step_and_clear(prepared)
            moved.append(1 - model.w.item())
        single.close()  # after two micro-batches of the second window
        assert moved == [0.0, 0.0, 0.0, 3.0, 3.0, 3.0]


def test_a_failed_micro_batch_of_a_model_that_is_forgotten_stops_no_other_one() -> None:
    single = backend()
    for fails in (True, False):
        model = Weight()
        (prepared,) = single.prepare([model], [SGD([model.w], lr=1.0)], [])
        if fails:
            single.window.begin()
            single.window.fail()
            single.close()
        else:
            single.window.begin_alone()
            train(model, prepared, 2.0)
            prepared.optimizers[0].step()
            assert 1 - model.w.item() == 2.0


def test_a_loss_after_the_end_is_told_that_the_end_has_forgotten_its_model() -> None:
    single = backend()
    model = Weight()
    with pytest.raises(AccumulationError, match=r"^backward\(\) before prepare\(model\)"):
        single.backward(model(torch.ones(())))
    single.prepare([model], [SGD([model.w], lr=1.0)], [])
    single.close()
    with pytest.raises(AccumulationError, match=r"^backward\(\) after end_training\(\) or free_memory\(\)"):
        single.backward(model(torch.ones(())))
