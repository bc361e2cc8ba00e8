"""MPI: the jobs of mpirun and mpiexec, which submit nothing."""

from typing import NoReturn

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.mpi.placement import mpi_placement
from drivetrain_clusters.protocol import JobPlacement


class Mpi:
    """The cluster `mpi`: ranks that mpirun starts now, without a queue."""

    placement = staticmethod(mpi_placement)

    def requeue(self, placement: JobPlacement) -> bool:
        """Return False: mpirun has no queue. The batch job around it may start it again for exit code 75."""
        del placement
        return False

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise ClusterError: there is no queue to submit to, and no submitted job to follow or cancel."""
        raise ClusterError(
            "mpi: mpirun starts a job at once and has no queue: run mpirun drivetrain launch ..., or submit to a "
            "cluster that has one, such as --on slurm"
        )

    plan = submit = follow = cancel = _refuse
