"""Run by `tools/check.py te`, in envs/te."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_precision.fp8.te_layers import to_te
from drivetrain_precision.fp8.te_recipes import te_recipe
from drivetrain_precision.fp8.te_state import begin_te_scaling, te_scaling_state

te: Any = pytest.importorskip("transformer_engine.pytorch", reason="tools/check.py te runs these")
quantization: Any = pytest.importorskip("transformer_engine.pytorch.quantization")

pytestmark = pytest.mark.usefixtures("layers_without_a_gpu")
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the library keeps its scales on CUDA only"
)
NAMES = ["scale_forward", "amax_history_forward", "scale_backward", "amax_history_backward"]


def layer_with_scales(history: int) -> Any:
    """A layer that holds what its first forward would make, on the host."""
    layer: Any = to_te(nn.Linear(16, 16))
    recipe = te_recipe("delayed", amax_history_len=history)
    for key, mode, count in (("scaling_fwd", "forward", 3), ("scaling_bwd", "backward", 2)):
        layer.fp8_meta[key] = quantization.DelayedScalingRecipeState(
            recipe, mode=mode, num_quantizers=count, device=torch.device("cpu")
        )
    return layer


def test_scales_and_histories_are_the_tensors_that_the_layer_works_with() -> None:
    layer = layer_with_scales(history=8)
    state = te_scaling_state(layer)
    assert [(name, tuple(each.shape)) for name, each in state.items()] == list(
        zip(NAMES, [(3,), (8, 3), (2,), (8, 2)], strict=True)
    )
    assert state["scale_forward"] is layer.fp8_meta["scaling_fwd"].scale
    state["amax_history_backward"].fill_(7.0)
    assert torch.equal(layer.fp8_meta["scaling_bwd"].amax_history, torch.full((8, 2), 7.0))


def test_there_is_no_state_before_the_first_forward() -> None:
    assert te_scaling_state(to_te(nn.Linear(16, 16))) == {}
    assert te_scaling_state(to_te(nn.LayerNorm(16))) == {}
    assert te_scaling_state(nn.Linear(16, 16)) == {}


def test_there_is_no_state_with_a_recipe_that_keeps_none() -> None:
    layer: Any = to_te(nn.Linear(16, 16))
    for key, mode in (("scaling_fwd", "forward"), ("scaling_bwd", "backward")):
        layer.fp8_meta[key] = quantization.RecipeState.create(te_recipe("mxfp8"), mode=mode, num_quantizers=3)
    assert te_scaling_state(layer) == {}


def test_scales_stay_out_of_the_state_dict() -> None:
    assert list(layer_with_scales(history=8).state_dict()) == ["weight", "bias"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_scales_cannot_be_made_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        begin_te_scaling(to_te(nn.Linear(16, 16)), te_recipe("delayed"))


@needs_cuda
def test_loaded_scales_go_on_in_the_first_forward() -> None:
    recipe = te_recipe("delayed", amax_history_len=4)
    inputs = torch.randn(32, 32, device="cuda", dtype=torch.bfloat16)
    trained = to_te(nn.Linear(32, 32, device="cuda", dtype=torch.bfloat16))
    for _ in range(3):
        with te.autocast(recipe=recipe):
            trained(inputs).float().square().mean().backward()
    saved = {name: each.clone() for name, each in te_scaling_state(trained).items()}
    assert list(saved) == NAMES
    fresh = to_te(nn.Linear(32, 32, device="cuda", dtype=torch.bfloat16))
    fresh.load_state_dict(trained.state_dict())
    begin_te_scaling(fresh, recipe)
    for name, each in te_scaling_state(fresh).items():
        each.copy_(saved[name])
    with te.autocast(recipe=recipe):
        expected = trained(inputs)
    with te.autocast(recipe=recipe):
        found = fresh(inputs)
    assert torch.equal(found, expected)
