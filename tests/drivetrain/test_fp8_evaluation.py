"""Evaluation of models in fp8 under `torch.inference_mode`, before, between and after training steps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain_precision import LayerFilter, TorchaoRecipe
from optional_modules import skip_without

skip_without("torchao")  # an extra of drivetrain-precision brings it

ALL = LayerFilter(skip_first=False, skip_last=False)


def evaluated(context: Any, recipe: TorchaoRecipe, backend: str) -> list[Tensor]:
    sections = {"run": {"show_plan": False}}
    options: dict[str, Any] = {"cpu": True, "mixed_precision": "fp8", "backend": backend}
    with Accelerator(fp8_recipe=recipe, sections=sections, **options) as accelerator:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
        rows, found = torch.randn(32, 32), list[Tensor]()
        for _ in range(2):
            with context():
                found.append(model(rows * 1).clone())
            accelerator.backward(model(rows).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        with context():
            return [*found, model(rows * 1)]


@pytest.mark.parametrize("backend", ["single", "fsdp"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "mxfp8"])
@pytest.mark.default_cases("tensorwise-fsdp")
def test_inference_mode_gives_what_no_grad_gives(scaling: Any, backend: str) -> None:
    recipe = TorchaoRecipe(scaling=scaling, layers=ALL)
    expected, found = (evaluated(each, recipe, backend) for each in (torch.no_grad, torch.inference_mode))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert not torch.equal(found[0], found[2])


def test_weights_that_are_gathered_in_fp8_can_be_evaluated_so_too() -> None:
    recipe = TorchaoRecipe(all_gather=True, layers=ALL)
    expected, found = (evaluated(each, recipe, "fsdp") for each in (torch.no_grad, torch.inference_mode))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
