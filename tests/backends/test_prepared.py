"""One prepared model: clipping, clearing and its state."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from drivetrain_backends import AccumulationWindow
from drivetrain_backends.prepared import TorchPrepared
from single_process import backend, linear


def start(model: nn.Module, *optimizers, accumulation: int = 1) -> tuple[AccumulationWindow, TorchPrepared]:
    single = backend(accumulation=accumulation)
    (prepared,) = single.prepare([model], optimizers, [])
    return single.window, prepared


def test_clipping_by_norm_gives_the_norm_before_and_the_step_result_keeps_it() -> None:
    model = linear()
    _, prepared = start(model, SGD(model.parameters(), lr=1.0))
    prepared.backward(model(torch.full((1, 2), 3.0)).sum())
    expected = torch.cat([model.weight.grad.flatten(), model.bias.grad]).norm()
    norm = prepared.clip(norm=0.5)
    torch.testing.assert_close(norm, expected)
    clipped = torch.cat([model.weight.grad.flatten(), model.bias.grad]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.5), atol=1e-5, rtol=0)
    prepared.optimizers[0].step()
    assert prepared.optimizers[0].last_result.grad_norm is norm


def test_clipping_by_value_bounds_each_element() -> None:
    model = linear()
    _, prepared = start(model)
    prepared.backward(model(torch.tensor([[3.0, -0.1]])).sum())
    assert prepared.clip(value=0.5) is None
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.5, -0.1]]))


def test_in_an_open_window_nothing_is_clipped_stepped_or_cleared() -> None:
    model = linear()
    window, prepared = start(model, SGD(model.parameters()), accumulation=2)
    before = model.weight.detach().clone()
    window.begin()
    prepared.backward(model(torch.ones(1, 2)).sum())
    gathered = model.weight.grad.clone()
    assert prepared.clip(norm=1e-3) is None
    prepared.optimizers[0].step()
    prepared.optimizers[0].zero_grad()
    assert torch.equal(model.weight.grad, gathered)
    assert torch.equal(model.weight, before)
    assert not prepared.optimizers[0].last_result.stepped


def test_clipping_wants_a_norm_or_a_value() -> None:
    _, prepared = start(linear())
    with pytest.raises(ValueError, match="give one of the two"):
        prepared.clip(norm=1.0, value=1.0)


def test_a_state_with_other_optimizers_or_schedulers_is_refused_and_nothing_loaded() -> None:
    model, other = linear(), linear()
    _, saved = start(model, AdamW(model.parameters()))
    _, prepared = start(other)
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(ValueError, match="holds 1 optimizers for Linear, and 0 are prepared"):
        prepared.load_state_dict(saved.state_dict())
    assert other.weight.abs().sum() > 0


def test_unwrapping_and_releasing_give_the_users_module() -> None:
    model = linear()
    _, prepared = start(model)
    assert prepared.unwrap() is model
    assert type(model) is not nn.Linear
    assert type(prepared.release()) is nn.Linear
