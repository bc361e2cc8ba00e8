"""Slurm: the jobs of sbatch and srun."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.output_tail import OutputTail
from drivetrain_clusters.protocol import JobPlacement, Submission
from drivetrain_clusters.request_values import job_file
from drivetrain_clusters.slurm.placement import slurm_placement
from drivetrain_clusters.slurm.script import plan_slurm
from drivetrain_clusters.system_command import patiently, run_command

_LOOK_SECONDS = 2.0
# A job in another state was cancelled by a user, or starts again by itself.
_MAY_GO_ON = "RUNNING,SUSPENDED,TIMEOUT"
# A job that ended is in one of these states, unless it is requeued.
_ENDED = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
        "OUT_OF_MEMORY", "REVOKED",
    }
)  # fmt: skip
# What to do about a refusal, by a part of Slurm's message.
_HINTS = {
    "invalid account": "say --option account=NAME; `sacctmgr show associations user=$USER` lists yours",
    "invalid partition": "say --option partition=NAME; `sinfo` lists them",
    "node configuration is not available": "no node has what is asked for; see `sinfo --Node --long`",
    "invalid job id": "Slurm does not know the job, or has forgotten it since it ended",
    "time limit": "`sinfo` shows the limit of each partition",
    "unable to contact slurm controller": "`scontrol ping` says whether slurmctld answers",
}
_JOB_ID = re.compile(r"\d+")
_WIDTH = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The state of a job, such as "RUNNING", and the exit code or signal of its script as `wait` returns it."""

    state: str
    may_requeue: bool
    wait_status: int

    @property
    def exit_code(self) -> int:
        """The exit code for the shell: 128 + the signal's number for a signal, 1 if Slurm ended the job."""
        if number := self.wait_status & 0x7F:
            return 128 + number
        return self.wait_status >> 8 or (0 if self.state == "COMPLETED" else 1)


class Slurm:
    """The cluster `slurm`."""

    placement = staticmethod(slurm_placement)

    def requeue(self, placement: JobPlacement) -> bool:
        """Put the job back into the queue.

        Return False if Slurm does so by itself (after a preemption), a user has cancelled it, or it has --no-requeue.
        """
        rows = _ask(placement.job_id, states=_MAY_GO_ON)
        if not rows or not rows[0].may_requeue:
            return False
        run_command("scontrol", "requeue", placement.job_id)
        return True

    plan = staticmethod(plan_slurm)

    def submit(self, submission: Submission) -> str:
        """Submit the job and return its id."""
        output = run_command(*submission.command, hints=_HINTS)
        job_id = output.strip().partition(";")[0]
        if not _JOB_ID.fullmatch(job_id):
            raise ClusterError(f"slurm: sbatch did not say the job's id, but {output.strip()!r}")
        return job_id

    def follow(self, job_id: str, submission: Submission, write: Callable[[str], None]) -> int:
        """Write the job's output until it ends, across requeues; return its exit code, 128 + N for signal N."""
        output = OutputTail(job_file(submission, job_id, ".out"))
        _show_job(job_id)  # an unknown one is an error at once
        while True:
            state = patiently(lambda: _show_job(job_id)).state
            write(output.read())
            time.sleep(_LOOK_SECONDS)
            # Twice, since a job that is requeued may look ended for a moment.
            if state in _ENDED and (job := patiently(lambda: _show_job(job_id))).state in _ENDED:
                write(output.read())
                return job.exit_code

    def cancel(self, job_id: str) -> None:
        """End the job; it is not requeued."""
        state = _show_job(job_id).state
        if state in _ENDED:
            raise ClusterError(f"slurm: job {job_id}: it has ended already, {state}")
        run_command("scancel", job_id, hints=_HINTS)


def _show_job(job_id: str) -> SlurmJob:
    rows = _ask(job_id, states="all")
    if not rows:
        raise ClusterError(f"slurm: job {job_id}: Slurm does not know it, or has forgotten it since it ended")
    return rows[0]


def _ask(job_id: str, *, states: str) -> list[SlurmJob]:
    """Return a job if it is in one of `states`. Columns of fixed width keep job names from imitating other columns.

    While processes of an ended job still run, Slurm shows it as COMPLETING, but finds it by its final state.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise ClusterError(f"slurm: job {job_id!r}: Slurm numbers its jobs")
    columns = ",".join(f"{name}:.{_WIDTH}" for name in ("State", "Requeue", "exit_code"))
    output = run_command(
        "squeue", "--noheader", f"--states={states}", f"--jobs={job_id}", "--Format", columns, hints=_HINTS
    )
    rows = [line.split() for line in output.splitlines() if line.strip()]
    return [SlurmJob(state=row[0], may_requeue=row[1] != "0", wait_status=int(row[2])) for row in rows]
