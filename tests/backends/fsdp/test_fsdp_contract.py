import pytest

from drivetrain_backends import BackendContract, FSDPBackend, FSDPSettings
from drivetrain_state import StateSettings, connect


def check(options: dict[str, object]) -> list[str]:
    class Contract(BackendContract):
        backend = FSDPBackend
        settings = FSDPSettings(**options)

    with connect(StateSettings(device="cpu", watchdog=False), needs_group=True) as context:
        return Contract().check_all(context)


ON_TWO: list[dict[str, object]] = [
    {"strategy": "full_shard", "wrap": ("Linear",)},
    {"strategy": "full_shard"},
    {"strategy": "shard_grad_op"},
    {"strategy": "hybrid_shard", "shard_size": 1},
    {"strategy": "no_shard"},
    {"strategy": "full_shard", "offload": True},
    {"strategy": "full_shard", "wrap": ("Linear",), "activation_checkpointing": "full"},
    {"strategy": "shard_grad_op", "activation_checkpointing": "selective", "offload": True},
    {"strategy": "full_shard", "min_num_params": 40},
]
ON_OTHERS: list[dict[str, object]] = [
    {"strategy": "shard_grad_op"},
    {"strategy": "no_shard"},
    {"strategy": "hybrid_shard", "shard_size": 1, "offload": True},
    {"strategy": "full_shard", "offload": True},
    {"strategy": "full_shard", "wrap": ("Linear",), "activation_checkpointing": "full"},
    {"strategy": "no_shard", "wrap": ("Linear",), "activation_checkpointing": "selective"},
]


@pytest.mark.costly
@pytest.mark.parametrize("options", ON_TWO, ids=str)
@pytest.mark.default_cases("{'strategy': 'full_shard', 'wrap': ('Linear',)}")
def test_fsdp_passes_the_contract_on_two_processes(run_ranks, options: dict[str, object]) -> None:
    ran = run_ranks(check, options, num_processes=2, timeout_seconds=170)
    assert len(ran) == 2
    assert "fp16, count, accumulated, clipped" in ran[0]


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
