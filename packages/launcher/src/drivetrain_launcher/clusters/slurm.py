"""Slurm: the jobs of sbatch and srun."""

import re
import time
from collections.abc import Callable, Mapping

from drivetrain_launcher.clusters.output_tail import OutputTail
from drivetrain_launcher.clusters.protocol import JobPlacement, JobRequest, Submission
from drivetrain_launcher.clusters.slurm_placement import slurm_placement
from drivetrain_launcher.clusters.slurm_script import output_file, plan_slurm
from drivetrain_launcher.clusters.system_command import run_command
from drivetrain_launcher.errors import LaunchError

_LOOK_SECONDS = 2.0
# A job that ended is in one of these states, unless it is requeued.
_ENDED = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
        "OUT_OF_MEMORY", "REVOKED",
    }
)  # fmt: skip
_JOB_ID = re.compile(r"\d+")


class Slurm:
    """The cluster `slurm`."""

    def placement(self, environment: Mapping[str, str]) -> JobPlacement | None:
        """Return the place of a task that srun started; None in any other process.

        Raises:
            LaunchError: Variables are missing or contradict each other.
        """
        return slurm_placement(environment)

    def requeue(self, placement: JobPlacement) -> bool:
        """Put the job back into the queue.

        Returns:
            False if Slurm does so by itself (the job was preempted), if a user has cancelled the job, and if the job
            was submitted with --no-requeue.

        Raises:
            LaunchError: Slurm refused.
        """
        job = _show_job(placement.job_id)
        state = job.get("JobState", "")
        if state in ("CANCELLED", "PENDING", "REQUEUED", "PREEMPTED") or job.get("Requeue") == "0":
            return False
        run_command("scontrol", "requeue", placement.job_id)
        return True

    def plan(self, request: JobRequest) -> Submission:
        """Return the script of a job, and the command that submits it.

        Raises:
            LaunchError: An option is unknown, or a value cannot be given to Slurm.
        """
        return plan_slurm(request)

    def submit(self, submission: Submission) -> str:
        """Submit the job and return its id.

        Raises:
            LaunchError: sbatch is not installed, or Slurm refused the job.
        """
        output = run_command(*submission.command, folder=submission.request.folder)
        job_id = output.strip().partition(";")[0]
        if not _JOB_ID.fullmatch(job_id):
            raise LaunchError(f"slurm: sbatch did not say the job's id, but {output.strip()!r}")
        return job_id

    def follow(self, job_id: str, submission: Submission, write: Callable[[str], None]) -> int:
        """Write the job's output as it appears, until the job ends, across requeues.

        Returns:
            The job's exit code; 128 + the signal's number if a signal ended it; 1 if Slurm ended it otherwise.
        """
        output = OutputTail(output_file(submission, job_id))
        while True:
            job = _show_job(job_id)
            write(output.read())
            if job.get("JobState") in _ENDED and job.get("EndTime", "Unknown") != "Unknown":
                time.sleep(_LOOK_SECONDS)  # a job that requeues itself looks ended for a moment
                job = _show_job(job_id)
                write(output.read())
                if job.get("JobState") in _ENDED:
                    return _exit_code(job)
            time.sleep(_LOOK_SECONDS)

    def cancel(self, job_id: str) -> None:
        """End the job; it is not requeued.

        Raises:
            LaunchError: Slurm does not know the job, or refused.
        """
        _check_id(job_id)
        _show_job(job_id)
        run_command("scancel", job_id)


def _check_id(job_id: str) -> None:
    if not _JOB_ID.fullmatch(job_id):
        raise LaunchError(f"slurm: job {job_id!r}: Slurm numbers its jobs")


def _show_job(job_id: str) -> dict[str, str]:
    """Return what Slurm knows of a job, by its names for it."""
    _check_id(job_id)
    words = run_command("scontrol", "show", "job", "--oneliner", job_id).split()
    return {name: text for name, mark, text in (word.partition("=") for word in words) if mark}


def _exit_code(job: Mapping[str, str]) -> int:
    code, _, number = job.get("ExitCode", "0:0").partition(":")
    if int(number or 0):
        return 128 + int(number)
    return int(code) or (0 if job.get("JobState") == "COMPLETED" else 1)
