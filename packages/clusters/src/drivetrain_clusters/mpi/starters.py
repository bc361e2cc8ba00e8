"""The programs that start the ranks of an MPI job, told apart by the variables that they alone set."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiStarter:
    """The variables of one family of MPI starters.

    Attributes:
        name: The name of the family, for error messages.
        rank: The variable of the rank.
        size: The variable of the number of ranks.
        local_rank: The variable of the rank on its node.
        local_size: The variable of the number of ranks on the node.
        num_nodes: The variable of the number of nodes; empty if the family has none.
        job: The variables that name the job; the first that is set counts.
    """

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
    """Return the starter of this process; None if no MPI starter has started it.

    Slurm's own PMI sets PMI_RANK and PMIX_RANK too, but neither of the variables of a rank on its node.
    """
    for starter in (OPEN_MPI, HYDRA):
        if starter.rank in environment and (starter is OPEN_MPI or starter.local_rank in environment):
            return starter
    return None


def is_started_by_mpi(environment: Mapping[str, str]) -> bool:
    """Return whether an MPI starter started this process, even inside the job of another cluster."""
    return find_starter(environment) is not None
