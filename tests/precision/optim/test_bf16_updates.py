from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from drivetrain_precision import Bf16Updates
from drivetrain_precision.optim.bf16_updates import forget_updates

Make = Callable[[list[torch.nn.Parameter]], Optimizer]
MAKERS = {
    "adamw": lambda p: AdamW(p, lr=1e-3),
    "one by one": lambda p: AdamW(p, lr=1e-3, foreach=False),
    "amsgrad": lambda p: Adam(p, lr=1e-3, amsgrad=True),
    "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9),
    "plain": lambda p: SGD(p, lr=0.1),
}
TARGET = torch.linspace(0.5, 2.0, 64)


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.normal(1.0, 0.1, (32,), generator=generator).to(dtype)) for _ in range(2)
    ]


def loss_of(weights: list[torch.nn.Parameter]) -> torch.Tensor:
    return (torch.cat([w.float() for w in weights]) - TARGET).square().mean()


def trained(
    make: Make, step: Callable[[Optimizer], object], dtype: torch.dtype, *, steps: int = 300
) -> tuple[float, list[torch.nn.Parameter], Optimizer]:
    weights = parameters(dtype)
    optimizer = make(weights)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(weights).backward()
        step(optimizer)
    return loss_of(weights).item(), weights, optimizer


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.default_cases("plain")
def test_tiny_updates_count_where_bf16_alone_stalls(make: Make) -> None:
    full, *_ = trained(make, lambda o: o.step(), torch.float32)
    plain, *_ = trained(make, lambda o: o.step(), torch.bfloat16)
    assert plain > full + 0.01
    for rounding in ("kahan", "stochastic"):
        found, weights, _ = trained(make, Bf16Updates(rounding).step, torch.bfloat16)
        assert found == pytest.approx(full, rel=0.05, abs=1e-3)
        assert {w.dtype for w in weights} == {torch.bfloat16}


def test_states_are_held_in_bf16_and_an_average_still_decays() -> None:
    weight = torch.nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=0.0, betas=(0.9, 0.999))
    updates = Bf16Updates("kahan")
    for step in range(400):
        weight.grad = torch.full_like(weight, 1.0 if step == 0 else 0.0)
        updates.step(optimizer)
    second = optimizer.state[weight]["exp_avg_sq"]
    assert second.dtype is torch.bfloat16
    assert second.float().mean().item() == pytest.approx(1e-3 * 0.999**399, rel=0.02)


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_parts_of_the_parameters_step_as_all_at_once(rounding: str) -> None:
    _, whole, _ = trained(MAKERS["adamw"], Bf16Updates(rounding).step, torch.bfloat16, steps=5)
    _, parts, _ = trained(
        MAKERS["adamw"], Bf16Updates(rounding, most_elements=1).step, torch.bfloat16, steps=5
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_an_optimizer_that_is_not_torchs_steps_once() -> None:
    class Counting(SGD):
        num_steps = 0

        def step(self, closure=None):
            self.num_steps += 1
            return super().step(closure)

    _, _, optimizer = trained(
        lambda p: Counting(p, lr=0.1), Bf16Updates("kahan", most_elements=1).step, torch.bfloat16, steps=3
    )
    assert optimizer.num_steps == 3


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_a_resumed_run_is_the_same_bit_by_bit(rounding: str) -> None:
    _, expected, _ = trained(MAKERS["adamw"], Bf16Updates(rounding).step, torch.bfloat16, steps=20)
    _, weights, stopped = trained(MAKERS["adamw"], Bf16Updates(rounding).step, torch.bfloat16, steps=10)
    resumed = MAKERS["adamw"](weights)
    resumed.load_state_dict(deepcopy(stopped.state_dict()))
    updates = Bf16Updates(rounding)
    for _ in range(10):
        resumed.zero_grad()
        loss_of(weights).backward()
        updates.step(resumed)
    assert all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True))


def test_parameters_in_fp32_are_stepped_as_they_are() -> None:
    full, half = parameters(torch.float32)[0], parameters(torch.bfloat16)[1]
    alone = torch.nn.Parameter(full.detach().clone())
    optimizer, reference = AdamW([full, half], lr=1e-3), AdamW([alone], lr=1e-3)
    for parameter in (full, half, alone):
        parameter.grad = torch.ones_like(parameter)
    Bf16Updates("stochastic").step(optimizer)
    reference.step()
    assert torch.equal(full, alone)
    assert optimizer.state[full]["exp_avg"].dtype is torch.float32
    assert "num_roundings" not in optimizer.state[full]


def test_a_parameter_without_a_gradient_and_the_groups_stay() -> None:
    first, second = parameters(torch.bfloat16)
    optimizer = AdamW([{"params": [first]}, {"params": [second], "lr": 1e-2}], lr=1e-3)
    before = second.detach().clone()
    first.grad = torch.ones_like(first)
    Bf16Updates("kahan").step(optimizer)
    assert [group["params"] for group in optimizer.param_groups] == [[first], [second]]
    assert torch.equal(second, before)
    assert second not in optimizer.state


def test_a_step_that_fails_leaves_parameters_groups_and_states() -> None:
    class Failing(AdamW):
        def step(self, closure=None):
            raise RuntimeError("no step")

    weights = parameters(torch.bfloat16)
    before = [w.detach().clone() for w in weights]
    optimizer = Failing(weights)
    loss_of(weights).backward()
    with pytest.raises(RuntimeError, match="no step"):
        Bf16Updates("kahan").step(optimizer)
    assert optimizer.param_groups[0]["params"] == weights
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    assert not any(optimizer.state.values())


def test_what_another_rounding_left_is_forgotten() -> None:
    _, weights, optimizer = trained(MAKERS["adamw"], Bf16Updates("kahan").step, torch.bfloat16, steps=2)
    forget_updates(optimizer, "stochastic")
    assert "num_roundings" in optimizer.state[weights[0]]
    forget_updates(optimizer, None)
    assert sorted(optimizer.state[weights[0]]) == ["exp_avg", "exp_avg_sq", "step"]


def test_an_unknown_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="rounding='nearest': must be stochastic or kahan"):
        Bf16Updates("nearest")
