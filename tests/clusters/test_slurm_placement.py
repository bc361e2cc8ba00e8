import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_jobs import slurm_job
from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.slurm.placement import slurm_placement


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_ranks_count_node_by_node_also_where_counts_differ(counts: list[int]) -> None:
    places = [slurm_placement(task) for task in slurm_job(counts)]
    assert [place.task_rank for place in places if place] == list(range(sum(counts)))
    assert {place.is_one_task_per_rank for place in places if place} == {max(counts) > 1}
    assert {place.master_addr for place in places if place} == {"n1"}


def test_a_placement_says_where_each_value_was_read() -> None:
    task = slurm_job((2, 2), CUDA_VISIBLE_DEVICES="1", SLURM_RESTART_COUNT="3")[3]
    place = slurm_placement(task)
    assert place is not None
    assert (place.job_id, place.num_nodes) == ("42", 2)
    assert (place.node_rank, place.local_task, place.task_rank) == (1, 1, 3)
    assert (place.devices, place.restart_count, place.hosts) == (("1",), 3, ("n1", "n2"))
    assert place.source("node_rank") == "SLURM_NODEID"
    assert place.source("devices") == "CUDA_VISIBLE_DEVICES"
    assert place.source("master_addr") == "SLURM_STEP_NODELIST"


def test_tasks_in_turns_over_the_nodes_are_ranked_node_by_node() -> None:
    """srun --distribution=cyclic: SLURM_PROCID goes round the nodes."""
    tasks = slurm_job((2, 2))
    for task, procid in zip(tasks, ("0", "2", "1", "3"), strict=True):
        task["SLURM_PROCID"] = procid
    assert [place.task_rank for place in map(slurm_placement, tasks) if place] == [0, 1, 2, 3]


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290", "batch"])
def test_the_shell_of_a_batch_job_is_no_task(step: str | None) -> None:
    shell = slurm_job((2, 2))[0]
    for name in [name for name in shell if name.startswith("SLURM_STEP")]:
        del shell[name]
    if step is not None:
        shell |= {"SLURM_STEP_ID": step, "SLURM_STEPID": step}
    assert slurm_placement(shell) is None


def test_a_rank_that_mpirun_started_in_a_slurm_job_is_mpis() -> None:
    assert slurm_placement({**slurm_job()[0], "OMPI_COMM_WORLD_RANK": "0"}) is None
    assert slurm_placement({**slurm_job()[0], "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}) is None
    # srun's own PMI sets PMI_RANK, too.
    assert slurm_placement({**slurm_job()[0], "PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "5"}) is not None


def test_an_address_that_the_job_exports_is_taken() -> None:
    place = slurm_placement(slurm_job(MASTER_ADDR="10.0.0.1", MASTER_PORT="4000")[1])
    assert place is not None
    assert (place.master_addr, place.master_port) == ("10.0.0.1", 4000)
    assert place.source("master_port") == "MASTER_PORT"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"SLURM_NTASKS": "3"}, "SLURM_NTASKS=3, SLURM_STEP_NUM_TASKS=4 contradict each other"),
        (
            {"SLURM_STEP_NUM_TASKS": "5"},
            "SLURM_STEP_NUM_TASKS=5, SLURM_STEP_TASKS_PER_NODE=2,2.* make 4 tasks",
        ),
        ({"SLURM_STEP_NUM_NODES": "3"}, "SLURM_STEP_NUM_NODES=3, SLURM_STEP_NODELIST=n1,n2.*names 2 nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "the counts are of 3 nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE='two': 'two' is no count"),
        ({"SLURM_STEP_NODELIST": "n[1-2"}, "SLURM_STEP_NODELIST='n.1-2': a bracket is not closed"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2.*the nodes are 0 to 1"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2.*has 2 tasks, counted from 0"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4.*there are 4 tasks"),
        ({"SLURMD_NODENAME": "n9"}, "SLURMD_NODENAME=n9.*node 0 of the list is n1"),
        ({"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE=2.*heterogeneous"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID='x': must be an integer"),
    ],
)
def test_contradictions_are_errors_with_names_and_values(changes: dict[str, str], names: str) -> None:
    with pytest.raises(ClusterError, match=f"slurm: .*{names}"):
        slurm_placement({**slurm_job((2, 2))[0], **changes})


def test_what_the_user_asked_for_counts_only_where_slurm_does_not_say_what_it_did() -> None:
    # srun --overcommit ignores --ntasks-per-node, with a warning, and leaves its variable.
    assert slurm_placement({**slurm_job((4, 4))[0], "SLURM_NTASKS_PER_NODE": "1"}) is not None
    old = slurm_job((2, 2))[0]
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        del old[name]
    place = slurm_placement({**old, "SLURM_NTASKS_PER_NODE": "2"})
    assert place is not None
    assert place.tasks_per_node == 2
    with pytest.raises(ClusterError, match=r"SLURM_STEP_NUM_TASKS=4, SLURM_NTASKS_PER_NODE=3.* make 6 tasks"):
        slurm_placement({**old, "SLURM_NTASKS_PER_NODE": "3"})


def test_a_variable_that_is_missing_is_named_with_others_that_are_there() -> None:
    task = slurm_job()[0]
    del task["SLURM_NODEID"]
    with pytest.raises(
        ClusterError, match=r"SLURM_NODEID is not set, but SLURMD_NODENAME, SLURM_JOBID, .* more are"
    ):
        slurm_placement(task)
