"""torchao's recipes on each kind of device that is there: a GPU's own products, and their emulation on a CPU."""

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from drivetrain_precision import TorchaoRecipe, convert_model
from drivetrain_precision.fp8.product_counts import ProductCounts, counting_products
from drivetrain_precision.fp8.torchao_recipes import Scaling

ON_DEVICES = pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
EACH_SCALING = pytest.mark.parametrize("scaling", get_args(Scaling))
ROWS, SIZE = 128, 128


def recipe_for(scaling: Scaling, kind: str) -> TorchaoRecipe:
    recipe = TorchaoRecipe(scaling=scaling)
    support = recipe.support(torch.device(kind))
    if support.level == "none":
        pytest.skip(support.reason)
    assert support.level == ("native" if kind == "cuda" else "emulated")
    return recipe


def net(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3))).to(kind)


def step(model: nn.Module, kind: str) -> Tensor:
    """Compute a loss and its gradients as a run in fp8 does."""
    rows = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1)).to(kind)
    with torch.autocast(kind, dtype=torch.bfloat16):
        output = model(rows)
    output.float().square().mean().backward()
    return output.detach().float()


def counts_of(model: nn.Module, kind: str) -> ProductCounts:
    with counting_products() as counts:
        step(model, kind)
    return counts


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@ON_DEVICES
@EACH_SCALING
def test_outputs_and_gradients_are_near_those_of_bf16(kind: str, scaling: Scaling) -> None:
    recipe, plain, model = recipe_for(scaling, kind), net(kind), net(kind)
    assert convert_model(model, recipe).converted == ("1",)
    allowed = 0.4 if scaling == "nvfp4" else 0.15  # of the norm: 4 bits, or 8 with 2 or 3 of fraction
    assert 0 < difference(step(model, kind), step(plain, kind)) < allowed
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert difference(found.grad, expected.grad) < allowed


@ON_DEVICES
@EACH_SCALING
def test_products_are_counted_where_the_requirements_say_so(kind: str, scaling: Scaling) -> None:
    recipe, model = recipe_for(scaling, kind), net(kind)
    convert_model(model, recipe)
    counts = counts_of(model, kind)
    assert counts.is_counted
    if recipe.requirements.counts_emulation:
        assert counts.scaled == (2 if scaling.endswith("gw_hp") else 3)
        assert counts.scaled + counts.others == 8
    else:
        assert (counts.scaled > 0) == (kind == "cuda")


@ON_DEVICES
@pytest.mark.parametrize(
    "scaling", ["tensorwise", *(pytest.param(each, marks=pytest.mark.slow) for each in get_args(Scaling)[1:])]
)
@pytest.mark.slow
def test_a_compiled_model_runs_the_same_products(kind: str, scaling: Scaling) -> None:
    recipe, eager, model = recipe_for(scaling, kind), net(kind), net(kind)
    for each in (eager, model):
        convert_model(each, recipe)
    # A CPU has its code of torch.compile in the tests of products; here it stands for the graphs alone.
    fast = torch.compile(model, backend="inductor" if kind == "cuda" else "aot_eager")
    assert not counts_of(fast, kind).is_counted
    model.zero_grad()
    found = counts_of(fast, kind)
    assert (found.is_counted, found.compiled) == (True, 2)
    assert found.scaled == counts_of(eager, kind).scaled
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert difference(one.grad, other.grad) < 0.1
