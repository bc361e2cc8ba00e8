"""MPI: the jobs of mpirun and mpiexec, which submit nothing."""

from collections.abc import Callable, Mapping
from typing import NoReturn

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.mpi.placement import mpi_placement
from drivetrain_clusters.protocol import JobPlacement, JobRequest, Submission


class Mpi:
    """The cluster `mpi`: ranks that mpirun starts now, without a queue."""

    def placement(self, environment: Mapping[str, str]) -> JobPlacement | None:
        """Return the place of a rank that mpirun started; None in any other process."""
        return mpi_placement(environment)

    def requeue(self, placement: JobPlacement) -> bool:
        """Return False: mpirun has no queue. The batch job around it may start it again for exit code 75."""
        del placement
        return False

    def plan(self, request: JobRequest) -> Submission:
        """Raise ClusterError: there is nothing to submit to."""
        del request
        _refuse()

    def submit(self, submission: Submission) -> str:
        """Raise ClusterError: there is nothing to submit to."""
        del submission
        _refuse()

    def follow(self, job_id: str, submission: Submission, write: Callable[[str], None]) -> int:
        """Raise ClusterError: there is nothing to follow."""
        del job_id, submission, write
        _refuse()

    def cancel(self, job_id: str) -> None:
        """Raise ClusterError: there is nothing to cancel."""
        del job_id
        _refuse()


def _refuse() -> NoReturn:
    raise ClusterError(
        "mpi: mpirun starts a job at once and has no queue: run mpirun drivetrain launch ..., or submit to a cluster "
        "that has one, such as --on slurm"
    )
