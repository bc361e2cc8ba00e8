import pytest

from drivetrain_launcher import LaunchError
from drivetrain_launcher.run.notebook.rank_pool_plan import RankPoolPlan, check_supported, plan_rank_pool


def test_each_rank_has_the_notebooks_variables_with_its_own_rank() -> None:
    plan = RankPoolPlan(num_processes=2, variables={"ASKED": "for"})
    first, second = plan.environments({"HOME": "/home/ada", "RANK": "7"}, port=1234)
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert (second["HOME"], second["ASKED"], second["MASTER_PORT"]) == ("/home/ada", "for", "1234")
    assert second["TORCHELASTIC_USE_AGENT_STORE"] == "True"


@pytest.mark.parametrize(
    ("num_processes", "given", "threads"), [(2, {}, "1"), (2, {"OMP_NUM_THREADS": "4"}, "4"), (1, {}, None)]
)
def test_several_ranks_share_the_cpu_as_under_launch(
    num_processes: int, given: dict[str, str], threads: str | None
) -> None:
    environment = RankPoolPlan(num_processes=num_processes).environments(given, port=1)[0]
    assert environment.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("backend", "is_replaced"),
    [("module://matplotlib_inline.backend_inline", True), ("agg", False), ("", False)],
)
def test_only_inline_figures_are_sent_to_the_notebook(backend: str, is_replaced: bool) -> None:
    environment = RankPoolPlan(num_processes=1).environments({"MPLBACKEND": backend}, port=1)[0]
    assert environment["MPLBACKEND"].endswith("figure_backend") == is_replaced
    assert is_replaced or environment["MPLBACKEND"] == backend


def test_settings_become_variables() -> None:
    plan = plan_rank_pool(3, mixed_precision="bf16", master_port=7, cpu=True)
    assert (plan.num_processes, plan.master_port) == (3, 7)
    assert plan.variables == {"DRIVETRAIN_RUN__MIXED_PRECISION": "bf16", "DRIVETRAIN_STATE__DEVICE": "cpu"}


def test_a_tpu_runtime_is_refused_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-8")
    with pytest.raises(
        LaunchError, match="this Kaggle runtime has a TPU, which torch does not see: install drivetrain"
    ):
        plan_rank_pool(None)
    assert plan_rank_pool(2, cpu=True).num_processes == 2


@pytest.mark.parametrize(
    ("environment", "num_processes", "place"),
    [
        ({"COLAB_RELEASE_TAG": "release-colab-20260101", "TPU_NAME": "x"}, None, "this Colab runtime"),
        ({"COLAB_BACKEND_VERSION": "next", "PJRT_DEVICE": "TPU"}, 8, "this Colab runtime"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "TPU_ACCELERATOR_TYPE": "v3-8"}, 8, "this Kaggle runtime"),
        ({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, 2, "this machine"),
        ({"COLAB_RELEASE_TAG": "x", "PJRT_DEVICE": "TPU"}, 1, None),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "PJRT_DEVICE": "CUDA"}, None, None),
        ({}, None, None),
    ],
)
def test_a_tpu_is_refused_but_for_one_process(
    environment: dict[str, str], num_processes: int | None, place: str | None
) -> None:
    if place is None:
        check_supported(environment, num_processes=num_processes)
        return
    with pytest.raises(LaunchError, match=rf"^num_processes={num_processes}: {place} has a TPU"):
        check_supported(environment, num_processes=num_processes)
