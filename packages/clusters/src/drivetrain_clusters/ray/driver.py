"""The driver of a job on Ray, which the Jobs API starts: `python -m drivetrain_clusters.ray.driver`.

It starts a launcher on each node, and starts all launchers again after a node was lost or the ranks have saved.
"""

import logging
import signal
import sys
from functools import partial
from threading import Event

import ray

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import RESUME_EXIT_CODE
from drivetrain_clusters.ray.attempt import Attempt
from drivetrain_clusters.ray.job import JOB_VARIABLE, RayJob
from drivetrain_config import environ
from drivetrain_messages import say


def main() -> int:
    """Run the job that the environment holds, and return its exit code."""
    job = RayJob.decode(environ.read(JOB_VARIABLE) or "")
    # The nodes hand their output to this process themselves, in whole lines; Ray would fold those that are alike.
    ray.init(log_to_driver=False, logging_level=logging.WARNING)
    # A handler that raised would do so in the middle of Ray's own code. Set after Ray, which sets one too.
    cancelled = Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: cancelled.set())
    number = 0
    while True:
        end = Attempt(job, number, partial(print, end="", flush=True), cancelled).run()
        if cancelled.is_set():
            say("the job was cancelled")
            return end.exit_code or 128 + signal.SIGTERM
        if not (end.lost or end.has_saved):
            return end.exit_code
        why = end.lost or "all ranks have saved"
        if number == job.request.max_requeues:
            say(f"{why}; the job has started again {number} times, and does so no more")
            return RESUME_EXIT_CODE if end.has_saved else end.exit_code or 1
        number += 1
        say(f"{why}; the job starts again, {number} of {job.request.max_requeues} times")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        say(f"error: {error}")
        sys.exit(2)
