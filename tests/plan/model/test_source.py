import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain_dispatch import CostError
from drivetrain_plan import PlanChoice, run_rank
from drivetrain_plan.errors import PlanError
from drivetrain_plan.model.huggingface import loss_of
from drivetrain_plan.model.source import BuiltSource, find_source
from drivetrain_plan.model.training_modes import MODES

FACTORY = """
import torch
from torch import nn

def model():
    return nn.Linear(3, 2)

def with_inputs():
    return nn.Linear(3, 2), lambda batch, tokens: {"input": torch.zeros(batch, 3)}

def nothing():
    return 1

def needs(width):
    return nn.Linear(width, 2)

def with_wrong_inputs():
    return nn.Linear(3, 2), lambda batch: {"input": torch.zeros(batch, 3)}

class Bare(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer, self.outputs = nn.Linear(3, 2), outputs

    def forward(self, x):
        return self.outputs(self.layer(x))

def inputs(batch, tokens):
    return {"x": torch.zeros(batch, 3)}

def scalar():
    return Bare(lambda x: x.sum()), inputs

def number():
    return Bare(lambda x: 1), inputs

def failing():
    return Bare(lambda x: {}["loss"]), inputs
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "planned_factories.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("planned_factories", None)
    return "planned_factories"


def test_a_factory_builds_on_meta(module: str) -> None:
    source = find_source(f"{module}:with_inputs")
    model = source.build(MODES["bf16"])
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert source.inputs(model, 5, 1)["input"].shape == (5, 3)
    assert isinstance(find_source(f"{module}:model").build(MODES["fp32"]), nn.Linear)


@pytest.mark.parametrize("named", ["no/such/folder", "no_such_module:model", "{}:absent", "{}:"])
def test_what_names_no_model_says_what_does(module: str, named: str) -> None:
    with pytest.raises(PlanError, match=r"name (one, or )?a function"):
        find_source(named.format(module))


def test_a_factory_that_returns_no_model_is_refused(module: str) -> None:
    with pytest.raises(PlanError, match="returned a int"):
        find_source(f"{module}:nothing").build(MODES["fp32"])


def test_a_factory_that_fails_is_named(module: str) -> None:
    with pytest.raises(PlanError, match=r"needs\(\) failed: TypeError: .*'width'"):
        find_source(f"{module}:needs").build(MODES["fp32"])


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        ("with_wrong_inputs", "the function of its inputs fails"),
        ("number", "no tensor of floating point numbers"),
        ("failing", "KeyError"),
    ],
)
def test_a_step_that_cannot_run_says_why(module: str, factory: str, why: str) -> None:
    source = BuiltSource(find_source(f"{module}:{factory}"), MODES["fp32"])
    with pytest.raises(CostError, match=why):
        run_rank(source, PlanChoice(), MODES["fp32"], num_tokens=1)


def test_a_model_may_return_its_loss(module: str) -> None:
    source = BuiltSource(find_source(f"{module}:scalar"), MODES["fp32"])
    assert run_rank(source, PlanChoice(), MODES["fp32"], num_tokens=1).gradients == 8 * 4
    whole = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    assert loss_of(whole) == 4
