import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain_plan.errors import PlanError
from drivetrain_plan.model.source import find_source
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
