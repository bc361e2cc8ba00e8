"""Show the output of a submitted job until it ends."""

from dataclasses import dataclass
from pathlib import Path

from drivetrain_clusters.jobs.record import find_record
from drivetrain_clusters.jobs.submitter import follow_job
from drivetrain_clusters.registry import make_cluster
from drivetrain_messages import argument


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowArguments:
    """The arguments of `drivetrain job follow`."""

    job: str = argument(..., "Id of the job, as `drivetrain submit` printed it.", positional=True)
    log_dir: Path = argument(Path("logs"), "Folder of the job's output, as it was at submission.")


def run(arguments: FollowArguments) -> int:
    """Show the output of a submitted job until it ends, and return its exit code."""
    record = find_record(arguments.job, arguments.log_dir)
    cluster = make_cluster(record.cluster)
    return follow_job(cluster, record, cluster.plan(record.request))
