"""The cluster of this machine alone: jobs that run in the background, and start again after a save."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.job_variables import JobVariables, job_port, visible_devices
from drivetrain_clusters.local.script import JOB_VARIABLE, RESTARTS_VARIABLE, SCRIPT_BEGIN, plan_local
from drivetrain_clusters.output_tail import OutputTail
from drivetrain_clusters.protocol import JobPlacement, Submission
from drivetrain_clusters.request_values import job_file
from drivetrain_clusters.system_command import run_command

_LOOK_SECONDS = 0.2
_BEGIN_SECONDS = 1.0
# Numbers of POSIX: importing signal here would keep a script from importing a module of that name of its own.
_SIGTERM = 15
_SIGKILL = 9


class Local:
    """The cluster `local`: one node, one task, no queue."""

    def placement(self, environment: Mapping[str, str]) -> JobPlacement | None:
        """Return the place of a job that `submit` has started here; None in any other process."""
        if JOB_VARIABLE not in environment:
            return None
        read = JobVariables("local", environment)
        job_id = str(read.integer(JOB_VARIABLE, least=1)[0])
        devices, of_devices = visible_devices(environment)
        return JobPlacement(
            cluster="local",
            job_id=job_id,
            num_nodes=1,
            node_rank=0,
            tasks_per_node=1,
            local_task=0,
            num_tasks=1,
            task_rank=0,
            master_addr="127.0.0.1",
            master_port=job_port(job_id),
            devices=devices,
            restart_count=read.optional_integer(RESTARTS_VARIABLE) or 0,
            sources={
                "job_id": JOB_VARIABLE,
                "master_port": JOB_VARIABLE,
                "restart_count": RESTARTS_VARIABLE,
                **of_devices,
            },
        )

    def requeue(self, placement: JobPlacement) -> bool:
        """Return False: the script of the job starts the command again by itself."""
        del placement
        return False

    plan = staticmethod(plan_local)

    def submit(self, submission: Submission) -> str:
        """Start the job in the background and return its id, the process id of its shell."""
        return run_command(*submission.command, folder=submission.request.folder).strip()

    def follow(self, job_id: str, submission: Submission, write: Callable[[str], None]) -> int:
        """Write the job's output as it appears, until the job ends, across restarts; return its exit code.

        The code is 137 if the job's shell was killed.
        """
        output = OutputTail(job_file(submission, job_id, ".out"))
        code = job_file(submission, job_id, ".code")
        while True:
            # Before the code is looked for, since it is written before the shell ends.
            runs = _is_running(job_id)
            write(output.read())
            if code.exists():
                write(output.read())
                return int(code.read_text())
            if not runs:
                return 128 + _SIGKILL
            time.sleep(_LOOK_SECONDS)

    def cancel(self, job_id: str) -> None:
        """End the job: its ranks save, and are not started again."""
        if not _is_running(job_id) or _is_another_program(job_id):
            raise ClusterError(f"local: job {job_id}: no job of this machine has this number; it has ended")
        os.kill(int(job_id), _SIGTERM)


def _is_running(job_id: str) -> bool:
    if not (job_id.isascii() and job_id.isdecimal()) or int(job_id) < 1:
        raise ClusterError(f"local: job {job_id!r}: the id of a job is the number of its process")
    try:
        os.kill(int(job_id), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise ClusterError(f"local: job {job_id}: the process is another user's") from None
    try:
        # The name in parentheses may hold anything.
        state = Path("/proc", job_id, "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # a system without /proc does not tell
        return True
    return state not in ("Z", "X")  # ended, but nobody has waited for it


def _is_another_program(job_id: str) -> bool:
    """Return whether a process id now belongs to a process that runs no script of a job: the job has ended."""
    deadline = time.monotonic() + _BEGIN_SECONDS
    try:
        # A process that is just beginning its program has no words yet.
        while not any(words := Path("/proc", job_id, "cmdline").read_bytes().split(b"\0")):
            if time.monotonic() > deadline:
                return True
            time.sleep(0.01)
    except OSError:  # a system without /proc does not tell
        return False
    for script in (Path(os.fsdecode(word)) for word in words if word.endswith(b".sh")):
        with suppress(OSError):  # removed since
            if script.read_text(errors="replace").startswith(SCRIPT_BEGIN):
                return False
    return True
