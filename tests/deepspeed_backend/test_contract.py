from typing import Any, cast

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

    class AloneContract(Contract):
        # On the four samples of one process the plain loop in float32 is itself 1.8e-6 (tied weights) to 4.3e-6
        # (a mean) away from the one in float64 after 20 steps; on two or four processes below 1e-6.
        tolerance = 5e-6

    with connect(StateSettings(device="cpu", watchdog=False), needs_group=True) as context:
        contract = AloneContract if context.topology.world_size == 1 else Contract
        return contract().check_all(context)


WAYS = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]


def passed(ran: list[object], num_processes: int) -> bool:
    """Whether every rank ran every check."""
    checks = {"check_gan", "check_resume", "tied weights", "frozen layer"}
    return len(ran) == num_processes and all(checks <= set(names) for names in cast("list[list[str]]", ran))


@pytest.mark.parametrize(
    ("stage", "offload"),
    [way if way == (3, True) else pytest.param(*way, marks=pytest.mark.slow) for way in WAYS],
)
def test_deepspeed_passes_the_contract(run_ranks, stage: int, offload: bool) -> None:
    assert passed(run_ranks(check, stage, offload, num_processes=2, timeout_seconds=170), 2)


@pytest.mark.slow
def test_deepspeed_passes_the_contract_with_activations_computed_again(run_ranks) -> None:
    assert passed(run_ranks(check, 3, False, "full", num_processes=2, timeout_seconds=170), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "stage", "offload"),
    [
        *((1, stage, offload) for stage, offload in WAYS),
        *((4, stage, offload) for stage, offload in WAYS if stage in (0, 3) or not offload),
    ],
)
def test_deepspeed_passes_the_contract_on_other_numbers_of_processes(
    run_ranks, num_processes: int, stage: int, offload: bool
) -> None:
    ran = run_ranks(check, stage, offload, num_processes=num_processes, timeout_seconds=170)
    assert passed(ran, num_processes)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "checkpointing"), [(1, "full"), (1, "selective"), (3, "selective")])
def test_deepspeed_passes_the_contract_with_other_activations_computed_again(
    run_ranks, stage: int, checkpointing: str
) -> None:
    assert passed(run_ranks(check, stage, False, checkpointing, num_processes=2, timeout_seconds=170), 2)
