from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from drivetrain_plan import ModuleSource, TrainingJob, TrainingMode, parse_hardware, plan_training
from planned_models import Perceptron


def seconds_of_products(dtype: torch.dtype) -> float:
    def inputs(batch: int, _: int) -> Mapping[str, Tensor]:
        return {"x": torch.zeros(batch, 64, dtype=dtype)}

    mode = TrainingMode(name="run", about="", dtype=None, autocast=None)
    source, hardware = ModuleSource(Perceptron(64).to(dtype), inputs), parse_hardware("1x80GB h100")
    return (
        plan_training(source, hardware, TrainingJob(batch=4), mode, num_tokens=1, exact=1)
        .plans[0]
        .time.compute
    )


@pytest.mark.slow
def test_products_take_the_rate_of_the_models_own_dtype() -> None:
    rates = parse_hardware("1x80GB h100")
    ratio = seconds_of_products(torch.float32) / seconds_of_products(torch.bfloat16)
    assert ratio == pytest.approx(rates.flops / rates.fp32_flops)
