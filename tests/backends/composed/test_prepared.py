"""One prepared model: clipping, clearing and its state."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from drivetrain_backends import AccumulationWindow
from drivetrain_backends.composed.prepared import ComposedPrepared
from plain_loop.backends import linear, step_and_clear
from plain_loop.backends import single as backend


def start(
    model: nn.Module, *optimizers, accumulation: int = 1
) -> tuple[AccumulationWindow, ComposedPrepared]:
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
    _, prepared = start(model, SGD(model.parameters(), lr=1.0))
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
    step_and_clear(prepared)
    assert torch.equal(model.weight.grad, gathered)
    assert torch.equal(model.weight, before)
    assert not prepared.optimizers[0].last_result.stepped


def test_clipping_wants_a_norm_or_a_value() -> None:
    _, prepared = start(linear())
    with pytest.raises(ValueError, match="give one of the two"):
        prepared.clip(norm=1.0, value=1.0)


@pytest.mark.parametrize("argument", ["norm", "value", "norm_type"])
@pytest.mark.parametrize("number", [-1.0, 0, float("nan"), "1", True, torch.ones(())])
def test_what_gradients_cannot_be_clipped_to_is_refused(argument: str, number: object) -> None:
    model = linear()
    _, prepared = start(model, SGD(model.parameters(), lr=1.0))
    prepared.backward(model(torch.ones(1, 2)).sum())
    before = model.weight.grad.clone()
    given = {"norm": 1.0, "norm_type": number} if argument == "norm_type" else {argument: number}
    with pytest.raises((TypeError, ValueError), match=rf"clip\({argument}=.*above 0"):
        prepared.clip(**given)
    assert torch.equal(model.weight.grad, before)


def test_an_infinite_norm_measures_only() -> None:
    model = linear()
    _, prepared = start(model, SGD(model.parameters(), lr=1.0))
    prepared.backward(model(torch.full((1, 2), 2.0)).sum())
    torch.testing.assert_close(prepared.clip(norm=float("inf")), torch.tensor(3.0))
    assert torch.equal(model.weight.grad, torch.full((1, 2), 2.0))


def test_clipping_what_no_prepared_model_trains_is_refused() -> None:
    model = linear()
    _, prepared = start(model, SGD(model.parameters(), lr=1.0))
    prepared.backward(model(torch.ones(1, 2)).sum())
    used_up = iter(model.parameters())
    list(used_up)
    for number, parameters in {2: linear().parameters(), 0: used_up}.items():
        with pytest.raises(ValueError, match=f"clip over {number} parameters, of which no prepared model"):
            prepared.clip(parameters, norm=1.0)


def test_clipping_by_value_before_there_are_gradients_does_nothing() -> None:
    model = linear()
    _, prepared = start(model, SGD(model.parameters(), lr=1.0))
    assert prepared.clip(value=1.0) is None
    assert model.weight.grad is None


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
    single = backend()
    (prepared,) = single.prepare([model], [], [])
    assert prepared.unwrap() is model
    assert type(model) is not nn.Linear
    single.close()
    assert type(model) is nn.Linear


@pytest.mark.parametrize("wrong", ["group", "name", "shape"])
def test_of_a_state_that_does_not_fit_nothing_is_loaded(wrong: str) -> None:
    model = linear()
    _, prepared = start(model, SGD(model.parameters()))
    state = prepared.state_dict()
    state["model"] = {name: value + 1 for name, value in state["model"].items()}
    match wrong:
        case "group":
            state["optimizers"][0]["param_groups"][0]["params"] = ["weight"]
        case "name":
            state["model"]["offset"] = state["model"].pop("bias")
        case _:
            state["model"]["bias"] = torch.zeros(2)
    said = {
        "group": r"differs from the checkpoint's by \['bias'\]",
        "name": r"missing \['bias'\]",
        "shape": "bias is of",
    }
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=said[wrong]):
        prepared.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Renamed(nn.Linear):
    """A layer that takes up states in which its bias had another name."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(_: nn.Module, state: dict[str, torch.Tensor], prefix: str, *__: object) -> None:
        state[f"{prefix}bias"] = state.pop(f"{prefix}offset")


def test_a_model_may_translate_the_names_of_a_state() -> None:
    model = Renamed()
    _, prepared = start(model)
    state = prepared.state_dict()
    state["model"] = {"weight": torch.ones(1, 2), "offset": torch.ones(1)}
    prepared.load_state_dict(state)
    assert torch.equal(model.bias, torch.ones(1))
