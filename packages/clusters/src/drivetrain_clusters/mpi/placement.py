"""The place of a rank in an MPI job, from the variables that mpirun and mpiexec set."""

from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.host_lists import expand_hosts
from drivetrain_clusters.job_variables import JobVariables, job_port, visible_devices
from drivetrain_clusters.protocol import JobPlacement

# Batch systems in whose jobs mpirun may run; the number of their job distinguishes jobs that share a node.
_BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
# Open MPI up to version 4 tells each rank where mpirun listens.
_MPIRUN_URI = "OMPI_MCA_orte_hnp_uri"


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiStarter:
    """The variables that only one family of MPI starters sets; the first variable in `job` that is set counts."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    num_nodes: str = ""
    job: tuple[str, ...] = ()


OPEN_MPI = MpiStarter(
    name="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    num_nodes="OMPI_MCA_orte_num_nodes",  # up to version 4; version 5 has no such variable
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
# MPICH, Intel MPI and MVAPICH.
HYDRA = MpiStarter(
    name="Hydra",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    job=("I_MPI_HYDRA_UUID",),
)


def find_starter(environment: Mapping[str, str]) -> MpiStarter | None:
    """Return the MPI starter of this process, even inside the job of another cluster; None without one.

    Slurm's own PMI sets PMI_RANK and PMIX_RANK too, but neither variable for a rank's index on its node.
    """
    for starter in (OPEN_MPI, HYDRA):
        if starter.rank in environment and (starter is OPEN_MPI or starter.local_rank in environment):
            return starter
    return None


def mpi_placement(environment: Mapping[str, str]) -> JobPlacement | None:
    """Return the place of a rank that Open MPI's mpirun or a Hydra (MPICH, Intel MPI) started; else None.

    No MPI starter tells its ranks the hosts of other ranks. Node 0 therefore comes from MASTER_ADDR, from the nodes
    of the Slurm or LSF job around mpirun, or, with Open MPI up to version 4, from the host of mpirun. Otherwise,
    `master_addr` is empty.
    """
    starter = find_starter(environment)
    if starter is None:
        if {"PMIX_RANK", "PMIX_NAMESPACE"} <= environment.keys() and "SLURM_STEP_ID" not in environment:
            raise ClusterError(
                f"mpi: PMIX_RANK={environment['PMIX_RANK']} was set by a PMIx starter, such as prterun, but no "
                "variable says how many ranks there are; start with mpirun or srun, or say --cluster none and give "
                "the ranks with --node-rank"
            )
        return None
    read = JobVariables("mpi", environment)
    num_tasks, _ = read.integer(starter.size, least=1)
    task_rank, _ = read.integer(starter.rank)
    tasks_per_node, _ = read.integer(starter.local_size, least=1)
    local_task, _ = read.integer(starter.local_rank)
    num_nodes, nodes_from = _nodes(read, starter, task_rank, num_tasks, local_task, tasks_per_node)
    job_from = next((name for name in (*starter.job, *_BATCH_JOBS) if environment.get(name)), None)
    job_id = environment[job_from] if job_from else "mpi"
    job_from = job_from or f"no variable: {starter.name} does not name its jobs"
    port = read.optional_integer("MASTER_PORT")
    master_addr, addr_from = _master(environment, num_nodes)
    devices, of_devices = visible_devices(environment)
    return JobPlacement(
        cluster="mpi",
        job_id=job_id,
        num_nodes=num_nodes,
        node_rank=task_rank // tasks_per_node,
        tasks_per_node=tasks_per_node,
        local_task=local_task,
        num_tasks=num_tasks,
        task_rank=task_rank,
        master_addr=master_addr,
        master_port=port or job_port(job_id),
        devices=devices,
        sources={
            "job_id": job_from,
            "num_nodes": nodes_from,
            "node_rank": f"{starter.rank} and {starter.local_size}",
            "tasks_per_node": starter.local_size,
            "local_task": starter.local_rank,
            "num_tasks": starter.size,
            "task_rank": starter.rank,
            "master_addr": addr_from,
            "master_port": "MASTER_PORT" if port else job_from,
            **of_devices,
        },
    )


def _nodes(
    read: JobVariables, starter: MpiStarter, rank: int, size: int, local_rank: int, local_size: int
) -> tuple[int, str]:
    """Check the ranks; return the number of nodes, and the variables from which the number follows."""
    if rank >= size:
        raise read.contradict(f"ranks count from 0 to {size - 1}", starter.rank, starter.size)
    if local_rank >= local_size or local_size > size:
        names = (starter.local_rank, starter.local_size, starter.size)
        raise read.contradict("a rank counts from 0, on its node and in all", *names)
    names = (starter.size, starter.local_size)
    counted = read.optional_integer(starter.num_nodes) if starter.num_nodes else None
    # Open MPI counts mpirun's own node too, where it may run no rank: more nodes than needed are no contradiction.
    if size % local_size or (counted is not None and size // local_size > counted):
        shown = read.show(*names, *([starter.num_nodes] if counted is not None else []))
        raise ClusterError(
            f"mpi: {shown}: the nodes have different numbers of ranks, and {starter.name} does not tell a rank those "
            "of the other nodes; start the same number on each, such as mpirun --map-by ppr:4:node"
        )
    if rank % local_size != local_rank:
        raise ClusterError(
            f"mpi: {read.show(starter.rank, starter.local_rank, starter.local_size)}: the ranks go round the nodes; "
            "place consecutive ranks on a node, as mpirun does with --map-by slot and without --rank-by node"
        )
    return size // local_size, " and ".join(names)


def _master(environment: Mapping[str, str], num_nodes: int) -> tuple[str, str]:
    """Return the address of node 0 and its source; an empty address if it is unknown."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], "MASTER_ADDR"
    if num_nodes == 1:
        return "127.0.0.1", "a job of one node"
    if nodelist := environment.get("SLURM_JOB_NODELIST"):
        try:
            return expand_hosts(nodelist)[0], "SLURM_JOB_NODELIST"
        except ValueError as error:
            raise ClusterError(f"mpi: SLURM_JOB_NODELIST={error}") from None
    if hosts := environment.get("LSB_HOSTS", "").split():
        return hosts[0], "LSB_HOSTS"
    _, mark, address = environment.get(_MPIRUN_URI, "").partition("tcp://")
    host = address.partition(":")[0].partition(",")[0]
    return (host, _MPIRUN_URI) if mark and host else ("", "no variable")
