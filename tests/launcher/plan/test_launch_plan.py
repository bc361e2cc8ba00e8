import sys

from drivetrain_launcher import LaunchPlan, LaunchTarget
from drivetrain_launcher.plan.launch_plan import WORKER


def test_a_plan_prints_what_will_happen() -> None:
    plan = LaunchPlan(
        mode="elastic",
        target=LaunchTarget(name="train.py", arguments=("--lr", "0.1")),
        num_nodes=2,
        node_rank=1,
        processes_per_node=2,
        master_addr="head",
        master_port=29500,
        environment={"OMP_NUM_THREADS": "1"},
        notes=("one thread each",),
    )
    ours = f"{sys.executable} {WORKER} train.py --lr 0.1"
    shown = str(plan).splitlines()
    assert shown[0] == "4 processes under torch's elastic agent: 2 nodes x 2"
    assert shown[1] == "rendezvous: static at head:29500, run 'none'"
    assert shown[2] == f"each rank: {ours}"
    assert "    OMP_NUM_THREADS=1" in shown
    assert "    GROUP_RANK=1" in shown
    assert shown[-3:] == [
        "rank 2: RANK=2 LOCAL_RANK=0",
        "rank 3: RANK=3 LOCAL_RANK=1",
        "note: one thread each",
    ]


def test_one_process_in_place_has_torchruns_variables() -> None:
    plan = LaunchPlan(
        mode="in place", target=LaunchTarget(name="train", kind="module"), environment={"A": "b"}
    )
    (only,) = plan.ranks()
    assert only.command == (sys.executable, "-m", "train")
    assert only.environment == {
        "A": "b",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "any free port",
    }


def test_ranks_that_another_launcher_has_set_stay() -> None:
    (only,) = LaunchPlan(
        mode="in place", target=LaunchTarget(name="t.py"), environment={"A": "b"}, has_ranks=True
    ).ranks()
    assert only.environment == {"A": "b"}


def test_only_several_nodes_that_were_told_their_ranks_meet_statically() -> None:
    target = LaunchTarget(name="train.py")
    assert LaunchPlan(mode="elastic", target=target, num_nodes=2).is_static_meeting
    assert not LaunchPlan(mode="elastic", target=target, num_nodes=2, rdzv_backend="c10d").is_static_meeting
    assert not LaunchPlan(mode="elastic", target=target).is_static_meeting
