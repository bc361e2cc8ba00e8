"""Cancel a submitted job."""

from dataclasses import dataclass
from pathlib import Path

from drivetrain_clusters.jobs.record import find_record
from drivetrain_clusters.registry import make_cluster
from drivetrain_messages import argument, say


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelArguments:
    """The arguments of `drivetrain job cancel`."""

    job: str = argument(..., "Id of the job, as `drivetrain submit` printed it.", positional=True)
    on: str | None = argument(
        None,
        "Cluster of the job; unset: found in its record in the log folder.",
        plugins="drivetrain.clusters",
    )
    log_dir: Path = argument(Path("logs"), "Folder of the job's output, as it was at submission.")


def run(arguments: CancelArguments) -> int:
    """Cancel a submitted job."""
    name = arguments.on or find_record(arguments.job, arguments.log_dir).cluster
    make_cluster(name).cancel(arguments.job)
    say(f"cancelled job {arguments.job} on {name}")
    return 0
