"""Run by `tools/check.py te`, in envs/te."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_precision import PrecisionError
from drivetrain_precision.fp8.te_layers import to_te
from drivetrain_precision.fp8.te_recipes import (
    TE_RECIPES,
    begin_te_scaling,
    te_recipe,
    te_scaling_state,
    te_unsupported,
)

te: Any = pytest.importorskip("transformer_engine.pytorch", reason="tools/check.py te runs these")
library: Any = pytest.importorskip("transformer_engine.common.recipe")
quantization: Any = pytest.importorskip("transformer_engine.pytorch.quantization")

with_layers = pytest.mark.usefixtures("layers_without_a_gpu")
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the library keeps its scales on CUDA only"
)
NAMES = ["scale_forward", "amax_history_forward", "scale_backward", "amax_history_backward"]


@pytest.mark.parametrize("name", TE_RECIPES)
def test_each_name_is_a_recipe_of_the_library(name: str) -> None:
    assert type(te_recipe(name)) is getattr(library, TE_RECIPES[name].recipe)
    assert callable(getattr(te, TE_RECIPES[name].available))


def test_options_are_fields_of_the_recipe() -> None:
    recipe = te_recipe("delayed", margin=1, amax_history_len=16, amax_compute_algo="most_recent")
    assert (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo) == (1, 16, "most_recent")


@pytest.mark.parametrize("name", ["hybrid", "HYBRID", "e4m3"])
def test_a_format_is_given_by_name(name: str) -> None:
    assert te_recipe("current", fp8_format=name).fp8_format is library.Format[name.upper()]


def test_the_default_formats_are_the_librarys() -> None:
    assert te_recipe("delayed").fp8_format is library.Format.HYBRID
    assert te_recipe("current").fp8_format is library.Format.HYBRID
    assert te_recipe("block").fp8_format is library.Format.E4M3
    assert te_recipe("mxfp8").fp8_format is library.Format.E4M3
    assert te_recipe("nvfp4").fp4_format is library.Format.E2M1


@pytest.mark.parametrize(
    ("name", "option", "given", "powers"),
    [
        ("current", "use_power_2_scales", True, True),
        ("current", "use_power_2_scales", False, False),
        ("block", "use_f32_scales", True, False),
        ("block", "use_f32_scales", False, True),
    ],
)
def test_options_for_powers_of_2_reach_the_quantisers(
    name: str, option: str, given: bool, powers: bool
) -> None:
    recipe = te_recipe(name, **{option: given})
    found = [recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad]
    assert [each.power_2_scale for each in found] == [powers] * 3
    assert f"power_2_scale={powers}" in repr(recipe)
    untouched = getattr(library, TE_RECIPES[name].recipe)()
    assert untouched.fp8_quant_fwd_inp.power_2_scale is (name == "block")


def test_the_library_itself_ignores_options_for_powers_of_2() -> None:
    """Else te_recipe need not set them."""
    assert not library.Float8CurrentScaling(use_power_2_scales=True).fp8_quant_fwd_inp.power_2_scale


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hybrid", {}, r"'hybrid' is no recipe of Transformer Engine: must be one of 'delayed', 'current'"),
        (
            "mxfp8",
            {"amax_history_len": 4},
            r"recipe 'mxfp8' has no option 'amax_history_len': there are margin",
        ),
        ("delayed", {"fp8_format": "e3m4"}, r"fp8_format='e3m4': must be one of e2m1, e4m3, e5m2, hybrid"),
        ("delayed", {"fp8_format": "e5m2"}, r"recipe 'delayed' .* Pure E5M2 training is not supported"),
        ("delayed", {"amax_history_len": "long"}, r"recipe 'delayed' .* valid integer"),
        ("block", {"x_block_scaling_dim": 2}, r"2D by 2D block gemm not supported"),
    ],
)
def test_what_the_library_does_not_know_is_an_error(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PrecisionError, match=message):
        te_recipe(name, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("name", TE_RECIPES)
def test_without_a_gpu_no_recipe_is_supported(name: str) -> None:
    assert te_unsupported(name) == "Transformer Engine computes on CUDA devices only, and there is none"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="about a GPU's capability")
@pytest.mark.parametrize("name", TE_RECIPES)
def test_a_gpu_supports_what_its_capability_allows(name: str) -> None:
    capability = torch.cuda.get_device_capability()
    least = {"delayed": (8, 9), "current": (8, 9), "block": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}[name]
    if capability < least:
        assert te_unsupported(name)
    elif capability < (12, 0) or name != "mxfp8":
        assert te_unsupported(name) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_the_library_itself_asks_of_every_recipe_but_nvfp4_whether_the_device_runs_it() -> None:
    """Else te_unsupported need not be asked before its autocast is entered."""
    check = pytest.importorskip("transformer_engine.pytorch.quantization").check_recipe_support
    for name in TE_RECIPES:
        if name == "nvfp4":
            check(te_recipe(name))
        else:
            with pytest.raises(RuntimeError, match="no NVIDIA driver"):
                check(te_recipe(name))


def layer_with_scales(history: int) -> Any:
    """A layer that holds what its first forward would make, on the host."""
    layer: Any = to_te(nn.Linear(16, 16))
    recipe = te_recipe("delayed", amax_history_len=history)
    for key, mode, count in (("scaling_fwd", "forward", 3), ("scaling_bwd", "backward", 2)):
        layer.fp8_meta[key] = quantization.DelayedScalingRecipeState(
            recipe, mode=mode, num_quantizers=count, device=torch.device("cpu")
        )
    return layer


@with_layers
def test_scales_and_histories_are_the_tensors_that_the_layer_works_with() -> None:
    layer = layer_with_scales(history=8)
    state = te_scaling_state(layer)
    assert [(name, tuple(each.shape)) for name, each in state.items()] == list(
        zip(NAMES, [(3,), (8, 3), (2,), (8, 2)], strict=True)
    )
    assert state["scale_forward"] is layer.fp8_meta["scaling_fwd"].scale
    state["amax_history_backward"].fill_(7.0)
    assert torch.equal(layer.fp8_meta["scaling_bwd"].amax_history, torch.full((8, 2), 7.0))


@with_layers
def test_there_is_no_state_before_the_first_forward() -> None:
    assert te_scaling_state(to_te(nn.Linear(16, 16))) == {}
    assert te_scaling_state(to_te(nn.LayerNorm(16))) == {}
    assert te_scaling_state(nn.Linear(16, 16)) == {}


@with_layers
def test_there_is_no_state_with_a_recipe_that_keeps_none() -> None:
    layer: Any = to_te(nn.Linear(16, 16))
    for key, mode in (("scaling_fwd", "forward"), ("scaling_bwd", "backward")):
        layer.fp8_meta[key] = quantization.RecipeState.create(te_recipe("mxfp8"), mode=mode, num_quantizers=3)
    assert te_scaling_state(layer) == {}


@with_layers
def test_scales_stay_out_of_the_state_dict() -> None:
    assert list(layer_with_scales(history=8).state_dict()) == ["weight", "bias"]


@with_layers
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_scales_cannot_be_made_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        begin_te_scaling(to_te(nn.Linear(16, 16)), te_recipe("delayed"))


@with_layers
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
