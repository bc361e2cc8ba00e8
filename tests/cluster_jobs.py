"""The environments of the tasks of jobs, as the clusters' own starters set them."""

from collections.abc import Sequence

Environment = dict[str, str]


def slurm_job(
    counts: Sequence[int] = (1, 1), *, job: int = 42, step: int = 0, hosts: Sequence[str] = (), **more: str
) -> list[Environment]:
    """The tasks of a step of srun, with a number of tasks on each node; recorded from Slurm 22.05."""
    names = list(hosts) or [f"n{node + 1}" for node in range(len(counts))]
    total, joined = str(sum(counts)), ",".join(names)
    each = ",".join(map(str, counts))
    return [
        {
            "SLURM_JOB_ID": str(job),
            "SLURM_JOBID": str(job),
            "SLURM_STEP_ID": str(step),
            "SLURM_STEPID": str(step),
            "SLURM_STEP_NODELIST": joined,
            "SLURM_JOB_NODELIST": joined,
            "SLURM_STEP_NUM_NODES": str(len(counts)),
            "SLURM_NNODES": str(len(counts)),
            "SLURM_STEP_NUM_TASKS": total,
            "SLURM_NTASKS": total,
            "SLURM_STEP_TASKS_PER_NODE": each,
            "SLURM_TASKS_PER_NODE": each,
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local),
            "SLURM_PROCID": str(sum(counts[:node]) + local),
            "SLURMD_NODENAME": names[node],
            **more,
        }
        for node, count in enumerate(counts)
        for local in range(count)
    ]


def open_mpi_job(num_nodes: int = 1, per_node: int = 2, **more: str) -> list[Environment]:
    """The ranks of Open MPI's mpirun; recorded from 4.1."""
    return [
        {
            "OMPI_COMM_WORLD_SIZE": str(num_nodes * per_node),
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(per_node),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % per_node),
            "OMPI_MCA_orte_num_nodes": str(num_nodes),
            "OMPI_MCA_orte_hnp_uri": "1734017024.0;tcp://192.0.2.2,10.0.0.2:60523;tcp6://[fd00::2]:57511",
            "PMIX_NAMESPACE": "1734017025",
            "PMIX_RANK": str(rank),
            **more,
        }
        for rank in range(num_nodes * per_node)
    ]


def hydra_job(num_nodes: int = 1, per_node: int = 2, **more: str) -> list[Environment]:
    """The ranks of Hydra's mpiexec; recorded from MPICH 4.0 and Intel MPI 2021.19."""
    return [
        {
            "PMI_SIZE": str(num_nodes * per_node),
            "PMI_RANK": str(rank),
            "PMI_FD": "7",
            "MPI_LOCALNRANKS": str(per_node),
            "MPI_LOCALRANKID": str(rank % per_node),
            **more,
        }
        for rank in range(num_nodes * per_node)
    ]
