import pytest

from drivetrain_backends import BackendContract, DDPBackend, DDPSettings, SingleBackend
from plain_loop.backends import context


class SingleContract(BackendContract):
    backend = SingleBackend


def check(contract: type[BackendContract]) -> list[str]:
    with context(needs_group=False) as where:
        return contract().check_all(where)


def test_single_passes_the_contract() -> None:
    assert len(check(SingleContract)) == len(BackendContract.cases) + 11


def test_a_backend_that_normalises_wrongly_fails_the_contract() -> None:
    class Wrong(SingleBackend):
        def backward(self, loss, *, count=None):
            super().backward(loss * 2, count=count)

    class WrongContract(BackendContract):
        backend = Wrong

    with context(needs_group=False) as where, pytest.raises(AssertionError, match="two models"):
        WrongContract().check_two_models(where)


def check_ddp(options: dict[str, object]) -> list[str]:
    class Contract(BackendContract):
        backend = DDPBackend
        settings = DDPSettings(**options)

    return check(Contract)


@pytest.mark.parametrize(
    ("num_processes", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(2, {"static_graph": True}, marks=pytest.mark.slow),
        pytest.param(
            2, {"find_unused_parameters": True, "gradient_as_bucket_view": False}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_ddp_passes_the_contract(run_ranks, num_processes: int, options: dict[str, object]) -> None:
    ran = run_ranks(check_ddp, options, num_processes=num_processes, timeout_seconds=120)
    assert ran == [[*BackendContract.cases, *ran[0][-11:]]] * num_processes
