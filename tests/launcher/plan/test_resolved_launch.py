import pytest

from cluster_jobs import hydra_job, open_mpi_job, slurm_job
from drivetrain_clusters.mpi.placement import mpi_placement
from drivetrain_clusters.protocol import JobPlacement
from drivetrain_clusters.slurm.placement import slurm_placement
from drivetrain_config import Layers
from drivetrain_config.source import Entry, Source
from drivetrain_launcher import Host, LaunchError, LaunchPlan, LaunchTarget, plan_launch
from drivetrain_launcher.plan.resolved_launch import ResolvedLaunch, resolve_launch

TARGET = LaunchTarget(name="train.py")


def place_of(task: dict[str, str]) -> JobPlacement:
    place = slurm_placement(task) or mpi_placement(task)
    assert place is not None
    return place


def placed(place: JobPlacement, **values: str) -> ResolvedLaunch:
    """Return the settings of the job and of a command line, with their sources."""
    said = {
        ("launch", name): (Entry(text, Source("command line", f"--{name.replace('_', '-')}")),)
        for name, text in values.items()
    }
    return resolve_launch(Layers(said), placement=place)


def plan_of(task: dict[str, str], host: Host | None = None, **values: str) -> LaunchPlan:
    place = place_of(task)
    return plan_launch(placed(place, **values).launch, TARGET, host or Host(), placement=place)


def test_one_task_a_node_becomes_a_launch_of_several_nodes() -> None:
    plan = plan_of(slurm_job()[1], processes_per_node="2")
    assert (plan.mode, plan.num_nodes, plan.node_rank, plan.rdzv_backend) == ("elastic", 2, 1, "static")
    assert (plan.master_addr, plan.master_port, plan.rdzv_id) == ("n1", 10546, "42")
    assert [rank.rank for rank in plan.ranks()] == [2, 3]
    assert "node_rank      1      SLURM_NODEID" in str(plan)


def test_one_task_on_one_node_meets_on_any_free_port() -> None:
    plan = plan_of(slurm_job((1,))[0], processes_per_node="2")
    assert (plan.num_nodes, plan.master_addr, plan.master_port) == (1, "127.0.0.1", 0)


def test_ranks_that_may_restart_agree_on_their_ranks() -> None:
    plan = plan_of(slurm_job(SLURM_RESTART_COUNT="2")[1], max_restarts="1")
    assert (plan.rdzv_backend, plan.node_rank, plan.rdzv_id) == ("c10d", None, "42-2")


def test_one_task_a_rank_has_torchruns_variables() -> None:
    plan = plan_of(slurm_job((2, 2))[3])
    (rank,) = plan.ranks()
    assert plan.mode == "in place"
    assert {name: text for name, text in rank.environment.items() if name != "OMP_NUM_THREADS"} == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "10546",
    }  # fmt: skip
    assert "4 processes, each started by the cluster" in str(plan)


@pytest.mark.parametrize(("task", "shown"), list(enumerate(["00320", "11320", "20311"])))
def test_nodes_with_different_numbers_of_tasks_have_one_world(task: int, shown: str) -> None:
    (rank,) = plan_of(slurm_job((2, 1))[task]).ranks()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert "".join(rank.environment[name] for name in names) == shown


@pytest.mark.parametrize(("visible", "device"), [("3", "cuda:0"), ("2,3", None)])
def test_a_task_that_is_bound_to_one_accelerator_uses_the_first_it_sees(
    visible: str, device: str | None
) -> None:
    gpu = Host(accelerator="cuda", accelerator_count=1)
    (rank,) = plan_of(slurm_job((2, 2), CUDA_VISIBLE_DEVICES=visible)[1], gpu).ranks()
    assert (rank.environment["LOCAL_RANK"], rank.environment.get("DRIVETRAIN_STATE__DEVICE")) == ("1", device)


@pytest.mark.parametrize(
    ("tasks", "values", "why"),
    [
        ((1, 1), {"num_nodes": "3"}, r"launch.num_nodes=3 \(--num-nodes on the command line\) contradicts "
         r"the job that slurm started, which has 2 \(SLURM_STEP_NUM_NODES\)"),
        ((1, 1), {"node_rank": "1"}, r"launch.node_rank=1 \(--node-rank .* which has 0 \(SLURM_NODEID\)"),
        ((1, 1), {"master_addr": "n2"}, r"master_addr=n2 \(--master-addr .* has n1 .*MASTER_ADDR"),
        ((2, 2), {"num_processes": "8"}, r"num_processes=8 .* has 4 \(SLURM_STEP_NUM_TASKS\)"),
        ((2, 2), {"processes_per_node": "4"}, r"processes_per_node=4 .* 2 \(SLURM_STEP_TASKS_PER"),
        ((2, 2), {"preload": "torch"}, r"preload=torch .* has started one task per rank"),
        ((2, 2), {"preload": "none"}, r"preload=none .* has started one task per rank"),
        ((2, 2), {"tail": "5"}, r"tail=5 .* has started one task per rank"),
        ((2, 2), {"log_dir": "logs"}, r"log_dir=logs .* has started one task per rank, SLURM_STEP"),
    ],
)  # fmt: skip
def test_a_setting_that_contradicts_the_job_names_both_values_and_sources(
    tasks: tuple[int, ...], values: dict[str, str], why: str
) -> None:
    with pytest.raises(LaunchError, match=why):
        placed(place_of(slurm_job(tasks)[0]), **values)


def test_settings_that_say_what_the_job_says_are_taken() -> None:
    said = {"num_nodes": "2", "node_rank": "1", "master_addr": "n1.cluster.org", "master_port": "4000"}
    plan = plan_of(slurm_job()[1], **said)
    assert (plan.master_addr, plan.master_port, plan.node_rank) == ("n1.cluster.org", 4000, 1)


@pytest.mark.parametrize("tasks", [2, 1])
def test_an_unknown_node_0_must_be_said(tasks: int) -> None:
    task = hydra_job(2, tasks)[0]
    why = r"nothing tells the 2 nodes \(PMI_SIZE and MPI_LOCALNRANKS\) where node 0 is"
    with pytest.raises(LaunchError, match=why):
        plan_of(task)
    assert plan_of(task, master_addr="head").master_addr == "head"


def test_mpirun_on_one_machine_needs_no_word() -> None:
    (rank,) = plan_of(open_mpi_job(1, 2)[1]).ranks()
    assert (rank.rank, rank.environment["MASTER_ADDR"]) == (1, "127.0.0.1")


def test_settings_that_nobody_gives_are_resolved_and_not_counted_as_given() -> None:
    resolved = resolve_launch(
        Layers.read(command_line={"launch": {"num_nodes": "2"}, "state": {"device": "cpu"}})
    )
    assert [(each.spec.section, each.spec.name, each.value, each.source) for each in resolved.given] == [
        ("launch", "num_nodes", 2, Source("command line", "--num-nodes")),
        ("state", "device", "cpu", Source("command line", "--state-device")),
    ]
    assert (resolved.launch.num_nodes, resolved.launch.max_restarts, resolved.device) == (2, 0, "cpu")
    assert (resolved.placement, resolved.file_notes) == (None, ())
    assert resolve_launch(Layers({})).given == ()
