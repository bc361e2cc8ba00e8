import pytest
import torch

from drivetrain_backends import BackendContract, DDPBackend, DDPSettings, SingleBackend
from drivetrain_state import StateSettings, connect


class SingleContract(BackendContract):
    backend = SingleBackend


class DDPContract(BackendContract):
    backend = DDPBackend


class StaticGraphContract(BackendContract):
    backend = DDPBackend
    settings = DDPSettings(static_graph=True)


class UnusedParametersContract(BackendContract):
    backend = DDPBackend
    settings = DDPSettings(find_unused_parameters=True, gradient_as_bucket_view=False)


def check(contract: type[BackendContract]) -> list[str]:
    with connect(StateSettings(device="cpu", watchdog=False)) as context:
        return contract().check_all(context)


def test_single_passes_the_contract() -> None:
    assert len(check(SingleContract)) == len(BackendContract.cases) + 9


def check_ddp() -> list[str]:
    return check(DDPContract)


def check_ddp_with_a_static_graph() -> list[str]:
    return check(StaticGraphContract)


def check_ddp_with_unused_parameters() -> list[str]:
    return check(UnusedParametersContract)


@pytest.mark.parametrize("num_processes", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_passes_the_contract(run_ranks, num_processes: int) -> None:
    ran = run_ranks(check_ddp, num_processes=num_processes, timeout_seconds=120)
    assert ran == [[*BackendContract.cases, *ran[0][-9:]]] * num_processes


@pytest.mark.parametrize("check", [check_ddp_with_a_static_graph, check_ddp_with_unused_parameters])
@pytest.mark.slow
def test_ddp_passes_the_contract_with_other_settings(run_ranks, check) -> None:
    assert len(run_ranks(check, num_processes=2, timeout_seconds=120)) == 2


def test_a_backend_that_normalises_wrongly_fails_the_contract() -> None:
    class Wrong(SingleBackend):
        def backward(self, loss, *, count=None):
            super().backward(loss * 2, count=count)

    class WrongContract(BackendContract):
        backend = Wrong

    with connect(StateSettings(device="cpu")) as context, pytest.raises(AssertionError, match="two models"):
        WrongContract().check_two_models(context)


def test_the_contract_is_run_in_double_precision() -> None:
    assert BackendContract.dtype is torch.float64
