import pytest

from cluster_jobs import hydra_job, open_mpi_job
from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.mpi.placement import mpi_placement


@pytest.mark.parametrize("job", [open_mpi_job, hydra_job])
def test_ranks_of_one_node_meet_on_loopback(job: object) -> None:
    assert callable(job)
    places = [mpi_placement(task) for task in job(1, 3)]
    assert [(place.task_rank, place.local_task, place.node_rank) for place in places if place] == [
        (0, 0, 0), (1, 1, 0), (2, 2, 0)
    ]  # fmt: skip
    assert {place.master_addr for place in places if place} == {"127.0.0.1"}


@pytest.mark.parametrize("job", [open_mpi_job, hydra_job])
def test_nodes_follow_from_ranks_and_counts(job: object) -> None:
    assert callable(job)
    places = [mpi_placement(task) for task in job(2, 2, MASTER_ADDR="head")]
    assert [(place.node_rank, place.local_task, place.num_nodes) for place in places if place] == [
        (0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)
    ]  # fmt: skip
    one_each = [mpi_placement(task) for task in job(3, 1, MASTER_ADDR="head")]
    assert [place.is_one_task_per_rank for place in one_each if place] == [False] * 3


@pytest.mark.parametrize(
    ("more", "address", "source"),
    [
        ({"MASTER_ADDR": "head"}, "head", "MASTER_ADDR"),
        ({"SLURM_JOB_NODELIST": "n[3-4]"}, "n3", "SLURM_JOB_NODELIST"),
        ({"LSB_HOSTS": "h1 h1 h2 h2"}, "h1", "LSB_HOSTS"),
        ({}, "192.0.2.2", "OMPI_MCA_orte_hnp_uri"),
    ],
)
def test_node_0_is_found_by_what_tells_it(more: dict[str, str], address: str, source: str) -> None:
    place = mpi_placement(open_mpi_job(2, 2, **more)[3])
    assert place is not None
    assert (place.master_addr, place.source("master_addr")) == (address, source)


def test_hydra_does_not_tell_where_node_0_is() -> None:
    place = mpi_placement(hydra_job(2, 2)[0])
    assert place is not None
    assert place.master_addr == ""


def test_jobs_have_ports_of_their_own_where_mpirun_names_them() -> None:
    first, second = (
        mpi_placement(open_mpi_job(PMIX_NAMESPACE=name)[0]) for name in ("1734017025", "1734017026")
    )
    assert first is not None
    assert second is not None
    assert first.master_port != second.master_port


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({**open_mpi_job(1, 2)[1], "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2.*count from 0 to 1"),
        ({**open_mpi_job(1, 2)[1], "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK=2"),
        ({**open_mpi_job(1, 2)[0], "OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE='two'"),
        # 3 + 2 ranks, as the first node sees it; 3 + 1, as the second does.
        ({**hydra_job(1, 3)[0], "PMI_SIZE": "5"}, "different numbers of ranks, and Hydra does not tell"),
        (
            {**open_mpi_job(2, 1)[1], "OMPI_COMM_WORLD_SIZE": "4"},
            "OMPI_MCA_orte_num_nodes=2: the nodes have different",
        ),
        # --map-by node: rank 1 is the first of the second node.
        (
            {**open_mpi_job(2, 2)[1], "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "the ranks go round the nodes.*--map-by slot",
        ),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"}, "PMIX_RANK=1 was set by a PMIx starter"),
        ({**open_mpi_job(2, 2)[0], "SLURM_JOB_NODELIST": "n["}, "SLURM_JOB_NODELIST='n.': a bracket"),
    ],
)
def test_what_a_rank_cannot_know_is_an_error_with_names_and_values(task: dict[str, str], why: str) -> None:
    with pytest.raises(ClusterError, match=f"mpi: .*{why}"):
        mpi_placement(task)


@pytest.mark.parametrize(
    "task",
    [{"PMI_RANK": "0", "PMI_SIZE": "2"}, {"PMIX_RANK": "0", "SLURM_STEP_ID": "0", "PMIX_NAMESPACE": "x"}],
)
def test_a_task_of_srun_with_its_own_pmi_is_not_mpis(task: dict[str, str]) -> None:
    assert mpi_placement(task) is None
