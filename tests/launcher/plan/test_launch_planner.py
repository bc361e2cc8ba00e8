import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher import Host, LaunchError, LaunchSettings, LaunchTarget, plan_launch

TARGET = LaunchTarget(name="train.py", arguments=("--lr", "0.1"))
EIGHT = Host(accelerator="cuda", accelerator_count=8)


def test_one_process_runs_in_place() -> None:
    plan = plan_launch(LaunchSettings(), TARGET, Host(), handed_down="[]")
    assert plan.mode == "in place"
    assert plan.command == (sys.executable, "train.py", "--lr", "0.1")
    assert plan.environment == {"DRIVETRAIN_CONFIG": "[]"}
    assert plan.notes == ()


def test_a_module_and_a_program_are_started_as_such() -> None:
    settings = LaunchSettings(num_processes=2)
    module = plan_launch(settings, LaunchTarget(name="pkg.train", kind="module"), Host())
    program = plan_launch(settings, LaunchTarget(name="./run.sh", arguments=("x",), kind="program"), Host())
    assert module.command[-2:] == ("-m", "pkg.train")
    assert program.command == ("./run.sh", "x")


def test_several_processes_get_torchruns_variables_and_one_of_ours() -> None:
    plan = plan_launch(LaunchSettings(num_processes=2), TARGET, Host(), handed_down="[]")
    assert plan.mode == "elastic"
    assert [rank.environment["RANK"] for rank in plan.ranks()] == ["0", "1"]
    ours = {name for name in plan.ranks()[0].environment if name.startswith("DRIVETRAIN_")}
    assert ours == {"DRIVETRAIN_CONFIG"}
    assert plan.ranks()[1].environment["WORLD_SIZE"] == "2"
    assert plan.master_port == 0


@given(
    num_nodes=st.integers(1, 1000),
    per_node=st.integers(1, 16),
)
def test_the_ranks_of_all_nodes_are_every_rank_once(num_nodes: int, per_node: int) -> None:
    def ranks(node: int) -> list[int]:
        settings = LaunchSettings(
            num_processes=num_nodes * per_node, num_nodes=num_nodes, node_rank=node, master_addr="head"
        )
        return [rank.rank for rank in plan_launch(settings, TARGET, Host()).ranks()]

    nodes = {0, num_nodes // 2, num_nodes - 1}
    for node in nodes:
        assert ranks(node) == list(range(node * per_node, (node + 1) * per_node))


def test_unset_takes_one_process_for_each_accelerator_and_says_so() -> None:
    plan = plan_launch(LaunchSettings(), TARGET, EIGHT)
    assert plan.processes_per_node == 8
    assert any("8 processes, one for each of 8 cuda devices" in note for note in plan.notes)


def test_more_processes_than_accelerators_is_an_error_with_the_ways_out() -> None:
    with pytest.raises(
        LaunchError, match=r"9 processes on this node, but it has 8 cuda devices.*--num-processes 8.*--cpu"
    ):
        plan_launch(LaunchSettings(num_processes=9), TARGET, EIGHT)
    plan_launch(LaunchSettings(num_processes=9), TARGET, Host())  # the CPU takes any number


def test_a_kind_of_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LaunchError, match="no cuda device that torch can use: say --cpu"):
        plan_launch(LaunchSettings(), TARGET, Host(accelerator="cuda"))


def test_chosen_devices_are_the_ones_that_count() -> None:
    plan = plan_launch(LaunchSettings(devices=(2, 3)), TARGET, EIGHT)
    assert plan.processes_per_node == 2
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(LaunchError, match="3 processes on this node, but it has 2 cuda devices"):
        plan_launch(LaunchSettings(devices=(2, 3), num_processes=3), TARGET, EIGHT)


@pytest.mark.parametrize(
    ("devices", "host", "message"),
    [
        ((0,), Host(), "no accelerator that torch can use"),
        ((0, 8), EIGHT, r"has 8 cuda devices, counted from 0; there is no 8"),
        ((1, 1), EIGHT, "names a device twice"),
        ((0,), Host(accelerator="mps", accelerator_count=1), "mps devices cannot be chosen"),
    ],
)
def test_devices_that_are_not_there(devices: tuple[int | str, ...], host: Host, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan_launch(LaunchSettings(devices=devices), TARGET, host)


def test_devices_by_identifier_and_under_a_restriction_are_left_to_the_driver() -> None:
    restricted = Host(accelerator="cuda", accelerator_count=2, visible_devices="6,7")
    assert plan_launch(LaunchSettings(devices=(6, 7)), TARGET, restricted).processes_per_node == 2
    plan = plan_launch(LaunchSettings(devices=("GPU-1b2c",)), TARGET, EIGHT)
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == "GPU-1b2c"


@pytest.mark.parametrize(
    ("settings", "host", "threads"),
    [
        (LaunchSettings(num_processes=2), Host(), "1"),
        (LaunchSettings(num_processes=2), Host(omp_num_threads="6"), None),
        (LaunchSettings(num_processes=2, threads_per_process=4), Host(omp_num_threads="6"), "4"),
        (LaunchSettings(num_processes=1), Host(), None),
        (LaunchSettings(num_processes=1, threads_per_process=3), Host(), "3"),
    ],
)
def test_threads_are_torchruns_unless_said(settings: LaunchSettings, host: Host, threads: str | None) -> None:
    assert plan_launch(settings, TARGET, host).environment.get("OMP_NUM_THREADS") == threads


def test_what_only_an_agent_can_do_brings_the_agent() -> None:
    plan = plan_launch(LaunchSettings(num_processes=1, max_restarts=2), TARGET, Host())
    assert plan.mode == "elastic"
    assert plan.max_restarts == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "--master-addr HOST"),
        ({"master_addr": "head"}, "--node-rank 0 to 1"),
        ({"master_addr": "head", "node_rank": 0, "master_port": 0}, "must be told the same port"),
        ({"master_addr": "head", "node_rank": 0, "max_restarts": 1}, "only with --rdzv-backend c10d"),
        ({"master_addr": "head", "rdzv_backend": "c10d"}, "the same --rdzv-id NAME"),
        (
            {"master_addr": "head", "rdzv_backend": "c10d", "rdzv_id": "a", "node_rank": 0},
            "agree on their ranks; leave it out",
        ),
    ],
)
def test_nodes_that_are_not_told_enough(settings: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan_launch(LaunchSettings(num_nodes=2, processes_per_node=1, **settings), TARGET, Host())


def test_several_nodes_meet_on_torchruns_port() -> None:
    settings = LaunchSettings(num_nodes=2, node_rank=1, master_addr="head", num_processes=8)
    plan = plan_launch(settings, TARGET, Host())
    assert (plan.master_addr, plan.master_port, plan.processes_per_node) == ("head", 29500, 4)


def test_an_elastic_plan_has_both_numbers_of_nodes_and_says_so() -> None:
    settings = LaunchSettings(
        num_nodes=4, min_nodes=1, rdzv_backend="c10d", rdzv_id="run", master_addr="a", processes_per_node=2
    )
    plan = plan_launch(settings, TARGET, Host())
    assert (plan.mode, plan.min_nodes, plan.num_nodes) == ("elastic", 1, 4)
    assert "elastic: goes on with 1 to 4 nodes; one that is silent for 6 s is left behind" in str(plan)


def test_a_range_of_nodes_with_static_rendezvous_is_refused() -> None:
    settings = LaunchSettings(num_nodes=4, min_nodes=1, node_rank=0, master_addr="a")
    with pytest.raises(
        LaunchError, match=r"--num-nodes 1:4: nodes come and go only with --rdzv-backend c10d"
    ):
        plan_launch(settings, TARGET, Host())


def test_output_that_is_chosen_needs_an_agent_even_for_one_process() -> None:
    assert plan_launch(LaunchSettings(prefix="none"), TARGET, Host()).mode == "in place"
    for settings in (LaunchSettings(prefix="all"), LaunchSettings(tail=5), LaunchSettings(show_ranks=(0,))):
        assert plan_launch(settings, TARGET, Host()).mode == "elastic"


def test_ranks_to_show_must_exist() -> None:
    settings = LaunchSettings(num_processes=4, num_nodes=2, node_rank=0, master_addr="a", show_ranks=(0, 4))
    with pytest.raises(
        LaunchError, match="--show-ranks 0,4: 4 processes have the ranks 0 to 3; there is no 4"
    ):
        plan_launch(settings, TARGET, Host())


def test_last_lines_need_an_output_that_the_launcher_sees() -> None:
    with pytest.raises(
        LaunchError, match="--tail 5: with --prefix none the launcher does not see the output"
    ):
        plan_launch(LaunchSettings(num_processes=2, tail=5, prefix="none"), TARGET, Host())


def test_the_last_lines_of_a_rank_that_is_not_shown_are_shown_when_it_fails() -> None:
    plan = plan_launch(LaunchSettings(num_processes=2, show_ranks=(0,)), TARGET, Host())
    assert (plan.tail_of(0), plan.tail_of(1)) == (0, 20)
    chosen = plan_launch(LaunchSettings(num_processes=2, show_ranks=(0,), tail=3), TARGET, Host())
    assert (chosen.tail_of(0), chosen.tail_of(1)) == (3, 3)
