import pytest
import torch

from drivetrain_precision import PrecisionError, PrecisionSettings, choose_policy, supported_modes

CPU = torch.device("cpu")


def test_fp32_needs_neither_autocast_nor_scaling() -> None:
    policy = choose_policy("no", CPU)
    assert (policy.mode, policy.autocast_dtype, policy.scaling) == ("no", None, None)


def test_bf16_autocasts_without_scaling() -> None:
    policy = choose_policy("bf16", CPU)
    assert (policy.autocast_dtype, policy.scaling) == (torch.bfloat16, None)


def test_fp16_scales_as_the_settings_say() -> None:
    settings = PrecisionSettings(initial_scale=4.0)
    policy = choose_policy("fp16", CPU, settings)
    assert (policy.autocast_dtype, policy.scaling) == (torch.float16, settings)


def test_every_mode_has_the_section_whose_limits_hold_without_a_loss_scale_too() -> None:
    settings = PrecisionSettings(max_skipped_steps=3)
    assert choose_policy("bf16", CPU, settings).settings is settings


def test_auto_takes_the_best_native_mode_and_says_why() -> None:
    support = supported_modes(CPU)
    expected = next(mode for mode in ("bf16", "fp16", "no") if support[mode].level == "native")
    policy = choose_policy("auto", CPU)
    assert policy.mode == expected
    assert f"auto chose '{expected}'" in policy.reason


def test_an_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(PrecisionError, match=r"mixed_precision='fp12': must be one of 'no', 'fp16'"):
        choose_policy("fp12", CPU)


@pytest.mark.parametrize("kind", ["xla", "hpu"])
def test_what_a_device_cannot_do_is_an_error_that_says_what_it_can(kind: str) -> None:
    with pytest.raises(PrecisionError, match=r"cannot compute in it .* it can do 'no', 'bf16'"):
        choose_policy("fp16", torch.device(kind))


def test_a_device_of_an_unknown_kind_computes_in_fp32_alone() -> None:
    assert choose_policy("auto", torch.device("meta")).mode == "no"
    with pytest.raises(PrecisionError, match="it can do 'no'"):
        choose_policy("bf16", torch.device("meta"))
