"""The dtype in which DDP's reducer sums gradients: as said, told, and held against the hook of the section."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from backends.replicas import ddp_backend, prepare_sgd
from drivetrain_backends import DDPBackend
from drivetrain_backends.protocol import AutoValue
from drivetrain_precision import PrecisionError, PrecisionSettings


def ddp(precision: dict[str, str], **settings: object) -> DDPBackend:
    return ddp_backend(precision=PrecisionSettings(**precision), **settings)


def averaged(
    dtype: torch.dtype, precision: dict[str, str], settings: dict[str, object]
) -> tuple[float, object]:
    """The mean of gradients 1 and 2**-8 of two ranks, and the reduction that is told."""
    backend, model, prepared = prepare_sgd(
        ddp(precision, **settings), nn.Linear(1, 1, bias=False, dtype=dtype), lr=1.0
    )
    backend.window.begin()
    x = torch.full((1, 1), [1.0, 2.0**-8][dist.get_rank()], dtype=dtype)
    prepared.backward(prepared.model(x).sum())
    told = backend.applied()["reduce_dtype"]
    mean = model.weight.grad.item()
    backend.close()
    return mean, told


@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": False}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "precision", "mean", "told"),
    [
        (torch.float32, {}, 0.5 + 2.0**-9, None),
        (torch.float32, {"reduce_dtype": "bf16"}, 0.5, "bf16"),
        (torch.float32, {"reduce_dtype": "fp32"}, 0.5 + 2.0**-9, "fp32"),
        (torch.bfloat16, {"reduce_dtype": "fp32"}, 0.5, "fp32"),  # the sum is in fp32, the gradient in bf16
    ],
)
def test_gradients_are_summed_in_the_dtype_that_is_said(
    run_ranks, settings, dtype: torch.dtype, precision: dict[str, str], mean: float, told: object
) -> None:
    assert run_ranks(averaged, dtype, precision, settings) == [(mean, told)] * 2


def test_weights_held_in_bf16_are_reduced_in_fp32_and_the_plan_says_why(run_ranks) -> None:
    told = run_ranks(averaged, torch.float32, {"param_dtype": "bf16"}, {})[0][1]
    assert told == AutoValue(
        value="fp32", reason="param_dtype='bf16': sums in bf16 would lose small gradients"
    )


def hooked(precision: dict[str, str], hook: str) -> object:
    backend = ddp(precision, communication_hook=hook)
    backend.prepare([nn.Linear(1, 1)], [], [])
    found = backend.applied()["communication_hook"], backend.applied()["reduce_dtype"]
    backend.close()
    return found


def test_a_hook_that_says_the_same_is_used(run_ranks) -> None:
    assert run_ranks(hooked, {"reduce_dtype": "bf16"}, "bf16") == [("bf16", "bf16")] * 2
    assert run_ranks(hooked, {"reduce_dtype": "bf16"}, "none") == [("none", "bf16")] * 2


def refusal(hook: str) -> str:
    with pytest.raises(PrecisionError) as refused:
        ddp({"reduce_dtype": "bf16"}, communication_hook=hook)
    return str(refused.value)


@pytest.mark.parametrize("hook", ["fp16", "power_sgd"])
def test_a_hook_that_contradicts_the_reduction_is_refused(run_ranks, hook: str) -> None:
    for told in run_ranks(refusal, hook):
        assert f"reduce_dtype='bf16' with ddp.communication_hook='{hook}'" in told
