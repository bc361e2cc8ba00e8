from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain_parallel import (
    Cut,
    LayerPlan,
    ParallelPlan,
    ParallelPlanError,
    divide_model,
    named_cuts,
    part_of,
    plan_model,
)
from parallel.divided import (
    ThreadRanks,
    assert_near,
    assert_same,
    gradients,
    on_threads,
    trained,
    with_random_values,
)
from parallel.models import WIDTH, Block, Perceptron

INPUT = torch.randn(2, 5, WIDTH, dtype=torch.float64)


def blocks() -> nn.Module:
    return with_random_values(nn.Sequential(Block(), Block()))


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 1),
)
def test_the_parts_of_all_ranks_are_the_whole(num_units: int, units: list[int], size: int, dim: int) -> None:
    cut = Cut(dim=dim, pieces=tuple(unit * num_units for unit in units), num_units=num_units)
    whole = torch.arange(cut.num_elements * 2).view((-1, 2) if dim == 0 else (2, -1))
    parts = [part_of(whole, cut, rank, size) for rank in range(size)]
    assert tuple(part.shape[dim] for part in parts) == cut.sizes(size)
    assert torch.cat([part.flatten() for part in parts]).sort()[0].equal(whole.flatten().sort()[0])
    if len(units) == 1:
        assert torch.equal(torch.cat(parts, dim), whole)


def test_a_part_is_a_copy() -> None:
    whole = torch.zeros(4)
    part_of(whole, Cut(dim=0, pieces=(4,), num_units=4), 0, 2).fill_(1)
    assert not whole.any()


def test_cuts_are_named_as_parameters_are() -> None:
    model = blocks()
    plan = plan_model(model, 2)
    found = list(named_cuts(model, plan))
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is parameter for name, parameter, _ in found)
    assert len(found) == sum(len(layer.cuts) for layer in plan.layers)


def test_parameters_stay_the_same_objects_and_hold_a_part() -> None:
    model = blocks()
    before = dict(model.named_parameters())
    model(INPUT).sum().backward()
    plan, models = plan_model(model, 2), [model, deepcopy(model)]

    def work(ranks: ThreadRanks) -> None:
        own = models[ranks.rank]
        divide_model(own, plan, ranks)
        assert own[0].up.out_features == own[0].down.in_features == 16
        assert own[0].qkv.out_features == 24
        assert own[0].num_heads == 2
        for name, parameter, cut in named_cuts(own, plan):
            assert parameter.shape[cut.dim] == cut.sizes(2)[ranks.rank], name
            assert parameter.grad is None

    on_threads(2, work)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    model = blocks()
    plan = plan_model(model, 2)

    def work(ranks: ThreadRanks) -> None:
        with pytest.raises(ParallelPlanError, match="a plan for 2 ranks with 3 ranks: plan for 3"):
            divide_model(model, plan, ranks)

    on_threads(3, work)


def test_a_model_is_divided_once() -> None:
    plan = plan_model(blocks(), 2)

    def work(ranks: ThreadRanks) -> None:
        model = blocks()
        divide_model(model, plan, ranks)
        held = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(ParallelPlanError, match=r"0\.qkv of Sequential is divided already"):
            divide_model(model, plan, ranks)
        assert all(torch.equal(one, other) for one, other in zip(held, model.parameters(), strict=True))

    on_threads(2, work)


def test_a_plan_of_another_model_is_refused() -> None:
    plan = ParallelPlan(size=1, layers=(LayerPlan(name="head", style="summed"),))

    def work(ranks: ThreadRanks) -> None:
        with pytest.raises(ParallelPlanError, match="the plan names 'head', which Perceptron does not have"):
            divide_model(Perceptron(), plan, ranks)

    on_threads(1, work)


def test_an_empty_plan_changes_nothing() -> None:
    model = nn.Linear(4, 4)
    on_threads(2, lambda ranks: divide_model(model, ParallelPlan(size=2), ranks))
    assert type(model) is nn.Linear


def check(work_of: object, *, model: nn.Module | None = None) -> None:
    """Compare what a function makes of a divided model and of the whole one."""
    whole = model or blocks()
    plan = plan_model(whole, 2)
    expected = work_of(deepcopy(whole))  # type: ignore[operator]

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(whole)
        divide_model(own, plan, ranks)
        assert_near("the result", work_of(own), expected, 1e-9)  # type: ignore[operator]

    on_threads(2, work)


def test_a_deep_copy_of_a_divided_model_computes_the_same() -> None:
    model = blocks()
    plan = plan_model(model, 2)
    output, of_inputs = trained(model, [INPUT])
    expected = gradients(model)

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(model)
        divide_model(own, plan, ranks)
        copied = deepcopy(own)
        for parameter in own.parameters():
            parameter.data.zero_()
        copied.zero_grad()
        found, of_own = trained(copied, [INPUT])
        assert_near("the output", found, output, 1e-9)
        assert_near("the gradient of the input", of_own[0], of_inputs[0], 1e-9)
        for name, _, cut in named_cuts(copied, plan):
            whole = expected[name]
            assert whole is not None
            part = part_of(whole, cut, ranks.rank, 2)
            assert_near(name, gradients(copied)[name], part, 1e-9, 1e-3)

    on_threads(2, work)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_divided_model_is_evaluated(mode: type) -> None:
    def evaluated(model: nn.Module) -> Tensor:
        with mode():
            first = model.eval()(INPUT)
        model.train()
        output, _ = trained(model, [INPUT])  # what was kept without gradients is not taken for it
        return torch.cat([first, output])

    check(evaluated)


def test_one_input_is_used_without_and_with_gradients() -> None:
    given = INPUT.clone().requires_grad_()

    def gradient(model: nn.Module) -> Tensor:
        own = given.detach().clone().requires_grad_()
        with torch.no_grad():
            model(own)
        (model(own) + 2 * model(own).square()).sum().backward()
        assert own.grad is not None
        return own.grad

    check(gradient)


def test_gradients_of_several_batches_add_up() -> None:
    def gradient(model: nn.Module) -> Tensor:
        for scale in (1.0, 3.0):
            model(scale * INPUT).square().sum().backward()
        assert model[0].norm.weight.grad is not None
        return model[0].norm.weight.grad

    check(gradient)


def test_frozen_layers_pass_gradients_on() -> None:
    model = blocks()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("0.norm"))
    assert_same(model, [INPUT], plan_model(model, 2))


def test_blocks_are_computed_again() -> None:
    def call(model: nn.Module, inputs: list[Tensor]) -> Tensor:
        (x,) = inputs
        for block in model.children():
            x = checkpoint(block, x, use_reentrant=False)
        return x

    model = blocks()
    assert_same(model, [INPUT], plan_model(model, 2), call=call)


@pytest.mark.parametrize("is_autocast", [False, True], ids=["bf16", "autocast"])
def test_a_divided_model_computes_in_bf16(is_autocast: bool) -> None:
    model = blocks().float() if is_autocast else blocks().bfloat16()

    def call(own: nn.Module, inputs: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            return own(*inputs)

    plan = plan_model(model, 2)
    assert_same(model, [INPUT.to(next(model.parameters()).dtype)], plan, call=call, tolerance=0.1)


def test_hooks_and_names_stay() -> None:
    model = blocks()
    names = list(model.state_dict())
    calls: list[int] = []
    model[0].up.register_forward_hook(lambda *_: calls.append(1))
    plan = plan_model(model, 2)

    def work(ranks: ThreadRanks) -> None:
        own = deepcopy(model)
        divide_model(own, plan, ranks)
        own(INPUT)
        assert list(own.state_dict()) == names
        assert isinstance(own[0].up, nn.Linear)
        assert type(own[0].up).__name__ == "Linear"

    on_threads(2, work)
    assert len(calls) == 2
