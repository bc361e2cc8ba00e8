import pytest
import torch

from drivetrain_backends import FSDPSettings
from drivetrain_backends.fsdp.dtypes import plan_dtypes
from drivetrain_precision import PrecisionError, choose_policy

CPU = torch.device("cpu")


@pytest.mark.parametrize(("mode", "param"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_computes_in_half_and_reduces_in_fp32(mode: str, param: torch.dtype) -> None:
    plan = plan_dtypes(FSDPSettings(), choose_policy(mode, CPU), CPU)
    assert (plan.param, plan.reduce, plan.output, plan.upcast) == (param, torch.float32, None, True)


def test_without_mixed_precision_the_models_dtypes_stay() -> None:
    plan = plan_dtypes(FSDPSettings(), choose_policy("no", CPU), CPU)
    assert (plan.param, plan.reduce, plan.output, plan.upcast) == (None, None, None, False)


def test_the_root_alone_casts_outputs() -> None:
    plan = plan_dtypes(FSDPSettings(output_dtype="fp32"), choose_policy("bf16", CPU), CPU)
    assert plan.policy(is_root=True).output_dtype is torch.float32
    assert plan.policy(is_root=False).output_dtype is None


@pytest.mark.parametrize(
    ("said", "mode", "message"),
    [
        ("fp32", "bf16", "fsdp.param_dtype='fp32' with mixed_precision='bf16'"),
        ("fp16", "no", "fsdp.param_dtype='fp16' with mixed_precision='no': small gradients would be lost"),
    ],
)
def test_two_precisions_in_one_run_are_refused(said: str, mode: str, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        plan_dtypes(FSDPSettings(param_dtype=said), choose_policy(mode, CPU), CPU)
