import pytest
import torch

from drivetrain_backends import FSDPSettings
from drivetrain_backends.fsdp.plan import DtypePlan, plan_dtypes
from drivetrain_precision import PrecisionError, PrecisionSettings, choose_policy

CPU = torch.device("cpu")


def planned(mode: str, settings: FSDPSettings | None = None, **dtypes: str) -> DtypePlan:
    return plan_dtypes(settings or FSDPSettings(), choose_policy(mode, CPU, PrecisionSettings(**dtypes)))


@pytest.mark.parametrize(("mode", "computed"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_computes_in_half_and_reduces_in_fp32(mode: str, computed: torch.dtype) -> None:
    plan = planned(mode)
    assert (plan.compute, plan.reduce, plan.upcast) == (computed, torch.float32, True)


def test_without_mixed_precision_the_models_dtypes_stay() -> None:
    plan = planned("no")
    assert (plan.compute, plan.reduce, plan.upcast) == (None, None, False)


def test_weights_held_in_bf16_are_not_upcast_and_are_reduced_in_fp32() -> None:
    plan = planned("no", param_dtype="bf16")
    assert (plan.compute, plan.reduce, plan.upcast) == (torch.bfloat16, torch.float32, False)
    assert planned("bf16", param_dtype="bf16", reduce_dtype="bf16").reduce is torch.bfloat16


@pytest.mark.parametrize(("upcast", "param"), [(True, "bf16"), (False, "fp32")])
def test_an_upcast_that_contradicts_the_held_dtype_is_refused(upcast: bool, param: str) -> None:
    with pytest.raises(PrecisionError, match=f"fsdp.upcast={upcast} with precision.param_dtype='{param}'"):
        planned("bf16", FSDPSettings(upcast=upcast), param_dtype=param)


def test_an_upcast_that_says_the_same_is_allowed() -> None:
    assert planned("bf16", FSDPSettings(upcast=True), param_dtype="fp32").upcast is True
