from typing import Any

import pytest
import torch

from drivetrain_backends import BackendContract, DeepSpeedSettings
from drivetrain_backends.deepspeed.backend import DeepSpeedBackend
from drivetrain_state import StateSettings, connect


class DeepSpeedContract(BackendContract):
    backend = DeepSpeedBackend
    dtype = torch.float32  # DeepSpeed has no float64
    tolerance = 2e-6
    trains_models_together = False


def check(stage: int, offload: bool, checkpointing: Any = "none") -> list[str]:
    where = "cpu" if offload else None

    class Contract(DeepSpeedContract):
        modes = ("no",) if stage == 0 else ("no", "bf16")  # DeepSpeed has no fp16 on the CPU
        settings = DeepSpeedSettings(
            stage=stage,
            activation_checkpointing=checkpointing,
            blocks=("Linear",),
            offload_optimizer=where,
            offload_param=where if stage == 3 else None,
            config={"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else None,
        )

    with connect(StateSettings(device="cpu", watchdog=False), needs_group=True) as context:
        return Contract().check_all(context)


WAYS = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]


@pytest.mark.parametrize(("stage", "offload"), WAYS)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_deepspeed_passes_the_contract(run_ranks, num_processes: int, stage: int, offload: bool) -> None:
    ran = run_ranks(check, stage, offload, num_processes=num_processes, timeout_seconds=170)
    assert all({"check_gan", "check_resume", "tied weights", "frozen layer"} <= set(names) for names in ran)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_passes_the_contract_with_activations_computed_again(
    run_ranks, stage: int, checkpointing: str
) -> None:
    assert len(run_ranks(check, stage, False, checkpointing, num_processes=2, timeout_seconds=170)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "offload"), WAYS)
def test_deepspeed_passes_the_contract_on_four_processes(run_ranks, stage: int, offload: bool) -> None:
    assert len(run_ranks(check, stage, offload, num_processes=4, timeout_seconds=170)) == 4
