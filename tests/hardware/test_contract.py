"""Every backend passes its contract on the device: each step is that of a plain loop on the host."""

import sys

import pytest
import torch

from drivetrain_backends import (
    BackendContract,
    DDPBackend,
    FSDPBackend,
    FSDPSettings,
    SingleBackend,
)
from drivetrain_state import ParallelDims, StateSettings, connect
from hardware.devices import OnDevice, here
from optional_modules import skip_without
from sequence_layer import SequenceLayer

pytestmark = pytest.mark.as_tpu


class SingleContract(BackendContract):
    backend = SingleBackend


class DDPContract(BackendContract):
    backend = DDPBackend


class FSDPContract(BackendContract):
    backend = FSDPBackend
    settings = FSDPSettings()


class ByBlockContract(FSDPContract):
    settings = FSDPSettings(wrap=("Linear",))


class OffloadedContract(FSDPContract):
    settings = FSDPSettings(offload=True)


FSDP = {"whole": FSDPContract, "by block": ByBlockContract, "offloaded": OffloadedContract}


def check(name: str) -> list[str]:
    """Run every check of a contract of this module; the names of those that ran."""
    contract = getattr(sys.modules[__name__], name)
    settings = StateSettings(device=here().name, watchdog=False)
    checked = contract()
    if here().name == "tpu":  # which has no units for fp16
        checked.modes = ("no", "bf16")  # pyright: ignore[reportAttributeAccessIssue]
    with connect(settings, needs_group=contract.backend is not SingleBackend) as context:
        return checked.check_all(context)


def assert_complete(ran: list[str], device: str) -> None:
    of_device = {name for name in BackendContract.cases if device != "as_tpu" or "fp16" not in name}
    assert of_device < set(ran)


def test_single_passes_the_contract(on_device: OnDevice, device: str) -> None:
    (ran,) = on_device(check, "SingleContract")
    assert_complete(ran, device)


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.slow
def test_ddp_passes_the_contract(on_device: OnDevice, device: str, num_processes: int) -> None:
    for ran in on_device(check, "DDPContract", num_processes=num_processes):
        assert_complete(ran, device)


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("contract", FSDP.values(), ids=FSDP)
@pytest.mark.default_cases("by block-1")
def test_fsdp_passes_the_contract(
    on_device: OnDevice, device: str, contract: type[BackendContract], num_processes: int
) -> None:
    for ran in on_device(check, contract.__name__, num_processes=num_processes):
        assert_complete(ran, device)


MESHES = {
    "tensor 2": ("SingleContract", ParallelDims(tensor=2)),
    "tensor 2, sequences": ("SingleContract", ParallelDims(tensor=2, sequence=True)),
    "context 2": ("DDPContract", ParallelDims(context=2)),
}


def check_divided(mesh: str) -> list[str]:
    """Run two cases of a contract on models that two ranks divide; their names."""
    name, parallelism = MESHES[mesh]
    contract = type("Divided", (getattr(sys.modules[__name__], name),), {"layer": SequenceLayer})()
    settings = StateSettings(device=here().name, watchdog=False)
    cases = ("count, accumulated, clipped, uneven tails, 20 steps", "tied weights")
    with connect(settings, parallelism=parallelism, needs_group=True) as context:
        for case in cases:
            contract.check_case(context, case, contract.cases[case])
    return list(cases)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow
def test_divided_models_pass_the_contract(on_device: OnDevice, mesh: str) -> None:
    on_device(check_divided, mesh, num_processes=2)


def check_deepspeed(stage: int) -> list[str]:
    """Run every check of the contract under a stage of DeepSpeed; the names of those that ran."""
    from drivetrain_deepspeed import DeepSpeedBackend, DeepSpeedSettings

    class DeepSpeedContract(BackendContract):
        backend = DeepSpeedBackend
        dtype = torch.float32  # DeepSpeed has no float64
        tolerance = 1e-5
        trains_models_together = False
        settings = DeepSpeedSettings(
            stage=stage,
            config={"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else None,
        )

    with connect(StateSettings(device=here().name, watchdog=False), needs_group=True) as context:
        return DeepSpeedContract().check_all(context)


@pytest.mark.only_on("cuda", why="DeepSpeed has no accelerator for the simulated device")
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_passes_the_contract(on_device: OnDevice, stage: int, num_processes: int) -> None:
    skip_without("deepspeed")
    for ran in on_device(check_deepspeed, stage, num_processes=num_processes):
        assert {"tied weights", "frozen layer", "check_resume", "check_gan"} < set(ran)
