import pytest

from drivetrain_backends import BackendContract, FSDPBackend, FSDPSettings
from plain_loop.backends import context


def check(options: dict[str, object]) -> list[str]:
    class Contract(BackendContract):
        backend = FSDPBackend
        settings = FSDPSettings(**options)

    with context() as where:
        return Contract().check_all(where)


ON_TWO: list[dict[str, object]] = [
    {"strategy": "full_shard", "wrap": ("Linear",)},
    {"strategy": "full_shard"},
    {"strategy": "shard_grad_op"},
    {"strategy": "hybrid_shard", "shard_size": 1},
    {"strategy": "no_shard"},
    {"strategy": "full_shard", "offload": True},
    {"strategy": "shard_grad_op", "offload": True},
    {"strategy": "full_shard", "min_num_params": 40},
]
ON_OTHERS: list[dict[str, object]] = [
    {"strategy": "shard_grad_op"},
    {"strategy": "no_shard"},
    {"strategy": "hybrid_shard", "shard_size": 1, "offload": True},
    {"strategy": "full_shard", "offload": True},
    {"strategy": "no_shard", "wrap": ("Linear",)},
]


@pytest.mark.costly
@pytest.mark.parametrize("options", ON_TWO, ids=str)
@pytest.mark.default_cases("{'strategy': 'full_shard', 'wrap': ('Linear',)}")
@pytest.mark.ranks(2, timeout_seconds=170)
def test_fsdp_passes_the_contract_on_two_processes(options: dict[str, object]) -> None:
    assert "fp16, count, accumulated, clipped" in check(options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "options"),
    [
        (1, {"strategy": "hybrid_shard"}),
        (1, {"strategy": "full_shard"}),
        (4, {"strategy": "hybrid_shard", "shard_size": 2}),
        (4, {"strategy": "full_shard", "wrap": ("Linear",)}),
        *((number, options) for number in (1, 4) for options in ON_OTHERS),
    ],
    ids=str,
)
def test_fsdp_passes_the_contract_on_one_and_four(
    run_ranks, num_processes: int, options: dict[str, object]
) -> None:
    assert len(run_ranks(check, options, num_processes=num_processes, timeout_seconds=280)) == num_processes
