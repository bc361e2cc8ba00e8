"""Write a submission's files, submit it, and follow its output."""

import shlex
import sys

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.jobs.record import JobRecord, write_private, write_record
from drivetrain_clusters.protocol import Cluster, Submission
from drivetrain_messages import say

# The exit code of a command that Ctrl-C ended, as shells give it.
_INTERRUPTED = 130


def submit_job(cluster: Cluster, name: str, submission: Submission) -> JobRecord:
    """Write the files of a submission, submit it to the cluster of that name, and record the job."""
    for path, text in submission.files.items():
        try:
            write_private(path, text)
        except OSError as error:
            raise ClusterError(f"{path}: {error.strerror}; say another folder with --log-dir") from error
        say(f"wrote {path}")
    job_id = cluster.submit(submission)
    record = JobRecord(cluster=name, job_id=job_id, request=submission.request)
    write_record(record)
    say(f"submitted job {job_id} to {name}")
    return record


def follow_job(cluster: Cluster, record: JobRecord, submission: Submission) -> int:
    """Show the output of a job until it ends, and return its exit code; Ctrl-C leaves the job running, for code 130.

    A ClusterError of the cluster is raised again with the commands that follow and cancel the job.
    """

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        code = cluster.follow(record.job_id, submission, write)
    except KeyboardInterrupt:
        say(f"stopped following; job {record.job_id} goes on\n{how_to_go_on(record)}")
        return _INTERRUPTED
    except ClusterError as error:
        raise ClusterError(f"{error}; job {record.job_id} may go on\n{how_to_go_on(record)}") from error
    say(f"job {record.job_id} ended with exit code {code}")
    return code


def how_to_go_on(record: JobRecord) -> str:
    """Return the commands that follow and cancel a job."""
    place = shlex.join([record.job_id, "--log-dir", str(record.request.log_dir)])
    return f"  drivetrain job follow {place}\n  drivetrain job cancel {place}"
