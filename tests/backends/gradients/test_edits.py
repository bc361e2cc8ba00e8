"""Gradients that others change while they are no step's yet: told of at the next loss, clip or step."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain_backends import AccumulationError
from plain_loop.backends import backend_of, held, prepare_sgd, step_and_clear
from plain_loop.backends import single as backend_of_one

Edit = Callable[[nn.Module], object]


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(1, 1))
    model[2].requires_grad_(False)
    return model


def zero_grad(model: nn.Module) -> None:
    model.zero_grad()


def zero_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def drop_one(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def backward(model: nn.Module) -> None:
    model(batch(9)).sum().backward()


EDITS: tuple[Edit, ...] = (zero_grad, zero_in_place, drop_one, clip, backward)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number)).float().square().sum()


def said_by(
    kind: str, edit: Edit, *, mode: str = "no", steps: int = 1, count: int | None = None, first: bool
) -> str:
    """What the error says that an edit ends in, made before or after the backward of each micro-batch; else "".

    Nothing was stepped on by then.
    """
    backend, _, prepared = prepare_sgd(backend_of(kind, mode, accumulation=steps), net())
    try:
        for number in range(steps):
            backend.window.begin()
            with held(backend, [prepared]):
                if first:
                    edit(prepared.model)
                prepared.backward(loss_of(prepared.model, number), count=count)
                if not first:
                    edit(prepared.model)
            step_and_clear(prepared)
    except AccumulationError as error:
        assert prepared.optimizers[0].num_steps == 0
        return str(error)
    finally:
        backend.close()
    return ""


REGIMES = [{"steps": 3}, {"steps": 3, "count": 4}, {"steps": 2, "mode": "fp16"}]


@pytest.mark.parametrize("regime", REGIMES, ids=str)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_gradients_in_an_open_window_is_refused(edit: Edit, regime: dict) -> None:
    for first in (True, False):
        said = said_by("single", edit, first=first, **regime)
        assert said.startswith(("gradients of Sequential (0.weight", "an optimizer of Sequential steps")) or (
            first and edit is backward  # before any loss of ours, it is told of at the step
        )
        assert "accelerator.clip_grad_norm_" in said or first


@pytest.mark.parametrize("regime", [{"mode": "fp16"}, {"count": 4}], ids=str)
def test_an_edit_of_gradients_that_are_still_to_be_corrected_is_refused(regime: dict) -> None:
    for edit in (clip, backward):
        assert "were changed since their last loss" in said_by("single", edit, first=False, **regime)


@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_gradients_may_be_dropped_between_windows_and_before_a_step(mode: str) -> None:
    for edit in (zero_grad, zero_in_place, drop_one):
        assert said_by("single", edit, mode=mode, first=True) == ""
        assert said_by("single", edit, mode=mode, first=False) == ""


@pytest.mark.parametrize("edit", EDITS)
def test_in_a_plain_loop_gradients_may_be_edited(edit: Edit) -> None:
    assert said_by("single", edit, first=False) == ""


@pytest.mark.parametrize("clear", [zero_grad, zero_in_place])
def test_a_models_own_zero_grad_before_its_counted_losses_begins_anew(clear: Edit) -> None:
    """As in the loops of adversarial models, whose critic holds gradients of the generator's loss."""
    _backend, model, prepared = prepare_sgd(backend_of_one(), net())
    plain = net()
    prepared.backward(loss_of(prepared.model, 0), count=100)
    clear(model)
    prepared.backward(loss_of(prepared.model, 1), count=4)
    prepared.optimizers[0].step()
    (loss_of(plain, 1) / 4).backward()
    SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(model[0].weight, plain[0].weight)


def test_after_our_clip_gradients_are_final_and_may_be_edited() -> None:
    single, model, prepared = prepare_sgd(backend_of_one(accumulation=2), net())
    for number in range(4):
        single.window.begin()
        prepared.backward(loss_of(prepared.model, number))
        prepared.clip(norm=float("inf"))
        if single.window.closing:
            clip(model)
        step_and_clear(prepared)
    assert prepared.optimizers[0].num_steps == 2


def test_two_optimizers_of_a_model_clear_and_step_one_after_the_other() -> None:
    single, model = backend_of_one("fp16", accumulation=2), net()
    optimizers = [SGD(model[i].parameters(), lr=0.1) for i in range(2)]
    (prepared,) = single.prepare([model], optimizers, [])
    for number in range(4):
        single.window.begin()
        prepared.backward(loss_of(prepared.model, number))
        for optimizer in prepared.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [optimizer.num_steps for optimizer in prepared.optimizers] == [2, 2]


@pytest.mark.ranks(2)
def test_edits_are_refused_under_backends_of_several_ranks_too() -> None:
    refused = [said_by("ddp", edit, steps=3, first=True) for edit in (zero_grad, drop_one)]
    refused += [said_by("ddp", clip, first=False, **options) for options in ({"steps": 3}, {"count": 4})]
    assert all("were changed since their last loss" in said for said in refused)
    assert said_by("ddp", clip, first=False) == ""
