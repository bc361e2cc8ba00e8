from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from drivetrain_precision import (
    PrecisionError,
    PrecisionSettings,
    TorchaoRecipe,
    choose_policy,
    supported_modes,
)

CPU = torch.device("cpu")

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="an extra brings it")


@pytest.mark.parametrize(("mode", "dtype"), [("no", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_autocasts_and_fp16_alone_scales(mode: str, dtype: torch.dtype | None) -> None:
    settings = PrecisionSettings(initial_scale=4.0)
    policy = choose_policy(mode, CPU, settings)
    scaling = settings if mode == "fp16" else None
    assert (policy.mode, policy.autocast_dtype, policy.scaling) == (mode, dtype, scaling)


def test_every_mode_has_the_section_whose_limits_hold_without_a_loss_scale_too() -> None:
    settings = PrecisionSettings(max_skipped_steps=3)
    assert choose_policy("bf16", CPU, settings).settings is settings


def test_auto_takes_the_best_native_mode_and_says_why() -> None:
    support = supported_modes(CPU)
    expected = next(mode for mode in ("bf16", "fp16", "no") if support[mode].level == "native")
    policy = choose_policy("auto", CPU)
    assert policy.mode == expected
    assert f"auto chose '{expected}'" in policy.reason


@pytest.mark.parametrize(
    ("mode", "kind", "message"),
    [
        ("fp12", "cpu", r"mixed_precision='fp12': must be one of 'no', 'fp16'"),
        ("fp16", "xla", r"\(not all devices of XLA compute in fp16\); it can do 'no', 'bf16'"),
        ("fp16", "hpu", r"cannot compute in it .* it can do 'no', 'bf16'"),
        ("bf16", "meta", "it can do 'no'"),
    ],
)
def test_what_a_device_cannot_do_is_an_error_that_says_what_it_can(
    mode: str, kind: str, message: str
) -> None:
    with pytest.raises(PrecisionError, match=message):
        choose_policy(mode, torch.device(kind))


def test_a_device_of_an_unknown_kind_computes_in_fp32() -> None:
    assert choose_policy("auto", torch.device("meta")).mode == "no"


@needs_torchao
def test_fp8_computes_the_rest_in_bf16_and_says_by_which_recipe() -> None:
    policy = choose_policy("fp8", CPU)
    assert policy.recipe is not None
    assert (policy.mode, policy.mode_beside_recipe, policy.autocast_dtype) == ("fp8", "bf16", torch.bfloat16)
    assert policy.reason == f"{policy.recipe.name}: {policy.recipe.support(CPU).reason}"
    assert choose_policy("fp16", CPU).mode_beside_recipe == "fp16"


@needs_torchao
def test_a_recipe_given_in_code_is_that_of_the_policy() -> None:
    recipe = TorchaoRecipe(scaling="rowwise")
    assert choose_policy("fp8", CPU, recipe=recipe).recipe is recipe


@needs_torchao
@pytest.mark.slow
def test_fp8_where_it_cannot_run_is_an_error_and_bf16_must_be_asked_for() -> None:
    settings = PrecisionSettings(fp8_recipe="torchao_nvfp4")
    with pytest.raises(
        PrecisionError, match=r"mixed_precision='fp8': recipe 'torchao_nvfp4': .* fp8_fallback='bf16'"
    ):
        choose_policy("fp8", CPU, settings)
    policy = choose_policy("fp8", CPU, replace(settings, fp8_fallback="bf16"))
    assert (policy.mode, policy.recipe) == ("bf16", None)
    assert policy.reason.startswith("fp8_fallback: recipe 'torchao_nvfp4': it needs a Blackwell")


def test_the_fallback_must_be_one_that_there_is() -> None:
    with pytest.raises(ValueError, match="fp8_fallback='fp16': must be one of none, bf16"):
        PrecisionSettings(fp8_fallback="fp16")  # pyright: ignore[reportArgumentType]


def test_a_recipe_that_does_not_exist_is_refused_in_every_mode() -> None:
    with pytest.raises(PrecisionError, match="fp8_recipe='nonsense': there is no such recipe; there are "):
        choose_policy("bf16", CPU, PrecisionSettings(fp8_recipe="nonsense"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(
        PrecisionError, match=r"cuda cannot compute in it \(torch finds no CUDA device here\)"
    ):
        choose_policy("bf16", torch.device("cuda"))
