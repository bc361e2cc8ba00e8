"""Serve the cluster's job that a launcher is part of: find node 0, and start the job again after a save."""

import time

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import RESUME_EXIT_CODE
from drivetrain_clusters.registry import make_cluster
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.launch_plan import LaunchPlan
from drivetrain_messages import say

# The names of Kubernetes' pods appear in DNS seconds after the pods have started, and a resolver may keep the answer
# that there is none for half a minute.
_NAME_SECONDS = 90.0
_LOOK_SECONDS = 0.5


def check_address(plan: LaunchPlan, *, patience_seconds: float = _NAME_SECONDS) -> None:
    """Check that node 0's name has an address, and warn in a job, on node 0, if it is not this machine's.

    In a job the name may get its address after the nodes start, as the names of pods do.

    Raises:
        LaunchError: The name does not resolve; the message says what it was read from.
    """
    if plan.num_nodes == 1:
        return
    host, place = plan.master_addr, plan.placement
    told, remedy = host, "or say --master-addr with an address of node 0"
    if place is not None:
        remedy = "or export MASTER_ADDR in the job with an address of node 0"
        if host == place.master_addr:
            told = f"{host}, read from {place.source('master_addr')}"
    import socket  # takes tens of milliseconds

    from drivetrain_state.own_addresses import own_addresses

    deadline = time.monotonic() + (patience_seconds if place is not None else 0.0)
    is_told = False
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            break
        except (OSError, UnicodeError) as error:
            if isinstance(error, UnicodeError) or time.monotonic() >= deadline:
                raise LaunchError(
                    f"node 0 is {told}, but this node ({socket.gethostname()}) finds no address for that name "
                    f"({error}): mend the name's entry in DNS or /etc/hosts, {remedy}"
                ) from None
            if not is_told:
                say(
                    f"{host}, node 0 of the job, has no address yet; waiting for it, {patience_seconds:g} s at most"
                )
                is_told = True
            time.sleep(_LOOK_SECONDS)
    if place is not None and place.task_rank == 0 and not any(own_addresses(host)):
        say(
            f"node 0 is {told}, but this machine, where task 0 runs, has no such address; if the others cannot reach "
            "it, export MASTER_ADDR in the job with an address of this machine"
        )


def requeue_after(code: object, plan: LaunchPlan) -> int:
    """Return the exit code for the shell; have the cluster start the job again if all ranks have saved.

    Called by every launcher of the job. That of task 0 asks the cluster. Those of other tasks stay until the cluster
    stops them, or until the time that ranks have to save is over: a cluster may stop a job as soon as one of its
    tasks ends with an error, and that must not be before task 0 has asked.

    Args:
        code: The exit code of the ranks of this launcher, or the value with which the script called `sys.exit`.
        plan: The plan that was run.
    """
    shown = code if isinstance(code, int) else int(code is not None)
    place = plan.placement
    if shown != RESUME_EXIT_CODE or place is None:
        return shown
    import signal  # late, so that a script may have a module of this name
    from threading import Event

    stop = Event()

    def note(number: int, frame: object) -> None:
        del number, frame
        stop.set()

    # A cluster sends SIGTERM to every task once task 0 has asked; by then nothing is left to stop.
    signal.signal(signal.SIGTERM, note)
    may_requeue = plan.max_requeues is None or place.restart_count < plan.max_requeues
    if place.task_rank != 0:
        if may_requeue:
            stop.wait(plan.shutdown_timeout_seconds)
        return shown
    job = f"{place.cluster} job {place.job_id}"
    if not may_requeue:
        say(
            f"{job} has been started again {place.restart_count} times, and max_requeues={plan.max_requeues} allows "
            "no more: submit it again to go on"
        )
        return shown
    try:
        if make_cluster(place.cluster).requeue(place):
            say(f"{job} is in the queue again, and goes on from what was saved")
    except ClusterError as error:
        say(f"{job} was not put into the queue again: {error}")
    return shown
