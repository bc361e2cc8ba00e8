import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher import Host, LaunchError, LaunchPlan, LaunchSettings, LaunchTarget, plan_launch

TARGET = LaunchTarget(name="train.py", arguments=("--lr", "0.1"))
CPU = Host()
EIGHT = Host(accelerator="cuda", accelerator_count=8)


def plan(host: Host = CPU, target: LaunchTarget = TARGET, **settings: object) -> LaunchPlan:
    return plan_launch(LaunchSettings(**settings), target, host)


def test_one_process_runs_in_place() -> None:
    found = plan_launch(LaunchSettings(), TARGET, CPU, handed_down="[]")
    assert found.mode == "in place"
    assert found.command == (sys.executable, "train.py", "--lr", "0.1")
    assert found.environment == {"DRIVETRAIN_CONFIG": "[]"}
    assert found.notes == ()


def test_a_module_and_a_program_are_started_as_such() -> None:
    module = plan(target=LaunchTarget(name="pkg.train", kind="module"), num_processes=2)
    program = plan(target=LaunchTarget(name="./run.sh", arguments=("x",), kind="program"), num_processes=2)
    assert module.command[-2:] == ("-m", "pkg.train")
    assert program.command == ("./run.sh", "x")


def test_several_processes_get_torchruns_variables_and_one_of_ours() -> None:
    found = plan_launch(LaunchSettings(num_processes=2), TARGET, CPU, handed_down="[]")
    assert found.mode == "elastic"
    assert [rank.environment["RANK"] for rank in found.ranks()] == ["0", "1"]
    ours = {name for name in found.ranks()[0].environment if name.startswith("DRIVETRAIN_")}
    assert ours == {"DRIVETRAIN_CONFIG"}
    assert found.ranks()[1].environment["WORLD_SIZE"] == "2"
    assert found.master_port == 0


@given(num_nodes=st.integers(1, 1000), per_node=st.integers(1, 16))
def test_the_ranks_of_all_nodes_are_every_rank_once(num_nodes: int, per_node: int) -> None:
    for node in {0, num_nodes // 2, num_nodes - 1}:
        counts = {"num_processes": num_nodes * per_node, "num_nodes": num_nodes}
        ranks = [rank.rank for rank in plan(**counts, node_rank=node, master_addr="head").ranks()]
        assert ranks == list(range(node * per_node, (node + 1) * per_node))


@pytest.mark.parametrize(
    ("settings", "host", "count", "visible"),
    [
        ({}, EIGHT, 8, None),
        ({"num_processes": 9}, CPU, 9, None),  # the CPU takes any number
        ({"devices": (2, 3)}, EIGHT, 2, "2,3"),
        ({"devices": ("GPU-1b2c",)}, EIGHT, 1, "GPU-1b2c"),  # left to the driver, as under a restriction
        ({"devices": (6, 7)}, Host(accelerator="cuda", accelerator_count=2, visible_devices="6,7"), 2, "6,7"),
    ],
)
def test_processes_are_one_for_each_chosen_accelerator(
    settings: dict[str, object], host: Host, count: int, visible: str | None
) -> None:
    found = plan(host, **settings)
    assert found.processes_per_node == count
    assert found.environment.get("CUDA_VISIBLE_DEVICES") == visible


def test_a_number_of_processes_that_nobody_said_is_noted() -> None:
    assert any("8 processes, one for each of 8 cuda devices" in note for note in plan(EIGHT).notes)


@pytest.mark.parametrize(
    ("settings", "host", "threads"),
    [
        ({"num_processes": 2}, CPU, "1"),
        ({"num_processes": 2}, Host(omp_num_threads="6"), None),
        ({"num_processes": 2, "threads_per_process": 4}, Host(omp_num_threads="6"), "4"),
        ({"num_processes": 1}, CPU, None),
        ({"num_processes": 1, "threads_per_process": 3}, CPU, "3"),
    ],
)
def test_threads_are_torchruns_unless_said(
    settings: dict[str, object], host: Host, threads: str | None
) -> None:
    assert plan(host, **settings).environment.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"max_restarts": 2}, "elastic"),
        ({"prefix": "all"}, "elastic"),
        ({"tail": 5}, "elastic"),
        ({"show_ranks": (0,)}, "elastic"),
        ({"prefix": "none"}, "in place"),
    ],
)
def test_what_only_an_agent_can_do_brings_the_agent(settings: dict[str, object], mode: str) -> None:
    assert plan(num_processes=1, **settings).mode == mode


NODES = {"num_nodes": 2, "processes_per_node": 1}
HEAD = {**NODES, "master_addr": "head"}
AGREE = {**HEAD, "rdzv_backend": "c10d"}


@pytest.mark.parametrize(
    ("settings", "host", "message"),
    [
        ({}, Host(accelerator="cuda"), "no cuda device that torch can use: say --cpu"),
        ({}, Host(accelerator="xla"), r"torch can use: install torch-xla \(pip install .*; or say --cpu"),
        (
            {},
            Host(accelerator="tpu"),
            r"torch can use: install torch_tpu \(pip install 'drivetrain\[tpu\]'\)",
        ),
        (
            {"num_processes": 9},
            EIGHT,
            r"9 processes on this node, but it has 8 cuda devices.*--num-processes 8.*--cpu",
        ),
        (
            {"devices": (2, 3), "num_processes": 3},
            EIGHT,
            "3 processes on this node, but it has 2 cuda devices",
        ),
        ({"devices": (0,)}, CPU, "no accelerator that torch can use"),
        ({"devices": (0, 8)}, EIGHT, r"has 8 cuda devices, counted from 0; there is no 8"),
        ({"devices": (1, 1)}, EIGHT, "names a device twice"),
        ({"devices": (0,)}, Host(accelerator="mps", accelerator_count=1), "mps devices cannot be chosen"),
        (NODES, CPU, "--master-addr HOST"),
        (HEAD, CPU, "--node-rank 0 to 1"),
        ({**HEAD, "node_rank": 0, "master_port": 0}, CPU, "must be told the same port"),
        ({**HEAD, "node_rank": 0, "max_restarts": 1}, CPU, "only with --rdzv-backend c10d"),
        (AGREE, CPU, "the same --rdzv-id NAME"),
        ({**AGREE, "rdzv_id": "a", "node_rank": 0}, CPU, "agree on their ranks; leave it out"),
        (
            {**HEAD, "num_nodes": 4, "min_nodes": 1, "node_rank": 0},
            CPU,
            r"--num-nodes 1:4: nodes come and go only with --rdzv-backend c10d",
        ),
        (
            {**HEAD, "processes_per_node": 2, "node_rank": 0, "show_ranks": (0, 4)},
            CPU,
            "--show-ranks 0,4: 4 processes have the ranks 0 to 3; there is no 4",
        ),
        (
            {"num_processes": 2, "tail": 5, "prefix": "none"},
            CPU,
            "--tail 5: with --prefix none the launcher does not see the output",
        ),
    ],
)
def test_an_impossible_launch_is_an_error_with_the_way_out(
    settings: dict[str, object], host: Host, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(host, **settings)


def test_several_nodes_meet_on_torchruns_port() -> None:
    found = plan(num_nodes=2, node_rank=1, master_addr="head", num_processes=8)
    assert (found.master_addr, found.master_port, found.processes_per_node) == ("head", 29500, 4)


def test_an_elastic_plan_has_both_numbers_of_nodes_and_says_so() -> None:
    found = plan(**{**AGREE, "num_nodes": 4, "min_nodes": 1, "rdzv_id": "run"})
    assert (found.mode, found.min_nodes, found.num_nodes) == ("elastic", 1, 4)
    assert "elastic: goes on with 1 to 4 nodes; one that is silent for 6 s is left behind" in str(found)


@pytest.mark.parametrize(("tail", "expected"), [(None, (0, 20)), (3, (3, 3))])
def test_the_last_lines_of_a_rank_that_is_not_shown_are_shown_when_it_fails(
    tail: int | None, expected: tuple[int, int]
) -> None:
    found = plan(num_processes=2, show_ranks=(0,), tail=tail)
    assert (found.tail_of(0), found.tail_of(1)) == expected


def test_a_program_cannot_be_forked_and_a_lone_process_need_not() -> None:
    program = LaunchTarget(name="true", kind="program")
    with pytest.raises(LaunchError, match="true is started without Python; leave out --preload or --program"):
        plan(target=program, num_processes=2, preload=("json",))
    (note,) = plan(preload=("json",)).notes
    assert note == "--preload json: a single process imports by itself; nothing is forked"
