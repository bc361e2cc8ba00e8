"""MPI: the jobs of mpirun and mpiexec, which submit nothing."""

from collections.abc import Callable, Mapping
from typing import NoReturn

from drivetrain_launcher.clusters.mpi_placement import mpi_placement
from drivetrain_launcher.clusters.protocol import JobPlacement, JobRequest, Submission
from drivetrain_launcher.errors import LaunchError


class Mpi:
    """The cluster `mpi`: ranks that mpirun starts now, without a queue."""

    def placement(self, environment: Mapping[str, str]) -> JobPlacement | None:
        """Return the place of a rank that mpirun started; None in any other process.

        Raises:
            LaunchError: Variables are missing or contradict each other.
        """
        return mpi_placement(environment)

    def requeue(self, placement: JobPlacement) -> bool:
        """Return False: mpirun has no queue. The batch job around it may start it again for exit code 75."""
        del placement
        return False

    def plan(self, request: JobRequest) -> Submission:
        """Raise LaunchError: there is nothing to submit to."""
        del request
        _refuse()

    def submit(self, submission: Submission) -> str:
        """Raise LaunchError: there is nothing to submit to."""
        del submission
        _refuse()

    def follow(self, job_id: str, submission: Submission, write: Callable[[str], None]) -> int:
        """Raise LaunchError: there is nothing to follow."""
        del job_id, submission, write
        _refuse()

    def cancel(self, job_id: str) -> None:
        """Raise LaunchError: there is nothing to cancel."""
        del job_id
        _refuse()


def _refuse() -> NoReturn:
    raise LaunchError(
        "mpi: mpirun starts a job at once and has no queue: run mpirun drivetrain launch ..., or submit to a cluster "
        "that has one, such as --on slurm"
    )
