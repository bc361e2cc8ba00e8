import pytest

from drivetrain_clusters.protocol import JobPlacement
from drivetrain_config import Layers, resolve
from drivetrain_doctor.checked_run import CheckedRun, run_to_check
from drivetrain_launcher import Host, LaunchSettings
from drivetrain_launcher.plan.resolved_launch import place_layers


def run_in_job(**changes: object) -> CheckedRun:
    """Return the run without any flag in a job of two nodes, with changes to the job."""
    values: dict[str, object] = {
        "cluster": "slurm", "job_id": "7", "num_nodes": 2, "node_rank": 1, "tasks_per_node": 1, "local_task": 0,
        "num_tasks": 2, "task_rank": 1, "master_addr": "node0", "master_port": 31007,
        "sources": {"num_nodes": "SLURM_NNODES=2"},
    }  # fmt: skip
    placement = JobPlacement(**{**values, **changes})  # type: ignore[arg-type]
    settings = resolve(LaunchSettings, section="launch", layers=place_layers(Layers({}), placement)).value
    return run_to_check(settings, Host(), placement)


def test_launchs_flags_describe_the_run() -> None:
    settings = LaunchSettings(num_nodes=2, node_rank=1, master_addr="node0", processes_per_node=4)
    checked = run_to_check(settings, Host(), None)
    assert (checked.world_size, checked.node_rank, checked.master_port) == (8, 1, 29500)
    assert (checked.hosts_store, checked.is_idle) == (False, False)


def test_a_job_describes_the_run_without_flags() -> None:
    checked = run_in_job()
    assert (checked.num_nodes, checked.node_rank) == (2, 1)
    assert (checked.master_addr, checked.master_port) == ("node0", 31007)
    alone = run_in_job(num_nodes=1, node_rank=0, tasks_per_node=3, num_tasks=3)
    assert (alone.num_nodes, alone.processes_per_node) == (1, 3)


@pytest.mark.parametrize("local_task", [0, 3])
def test_of_one_task_a_rank_the_first_of_a_host_checks_for_all(local_task: int) -> None:
    checked = run_in_job(tasks_per_node=4, num_tasks=8, local_task=local_task)
    assert (checked.processes_per_node, checked.is_idle) == (4, local_task > 0)
