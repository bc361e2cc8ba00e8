"""Run a plan: in this process, by replacing it with a program, or with torch's agent; serve the cluster's job."""

import os
import time
from contextlib import ExitStack

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import RESUME_EXIT_CODE
from drivetrain_clusters.registry import make_cluster
from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.launch_plan import ANY_PORT, LaunchPlan
from drivetrain_launcher.run.runpy_main import run_as_main
from drivetrain_messages import say

# The names of Kubernetes' pods appear in DNS seconds after the pods have started, and a resolver may keep the answer
# that there is none for half a minute.
_NAME_SECONDS = 90.0
_LOOK_SECONDS = 0.5


def run_plan(plan: LaunchPlan) -> int:
    """Run a plan to its end.

    Returns:
        The exit code for the shell. A program run in place replaces this process, so that the call never returns.

    Raises:
        LaunchError: If the plan cannot be run on this machine.
        SystemExit: If a script that ran in place exits or fails.
    """
    if plan.placement is None or plan.placement.task_rank == 0:
        for note in plan.notes:
            say(note)
    if plan.log_dir is not None:
        try:
            plan.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"--log-dir {plan.log_dir}: {error.strerror}; say a folder that can be created"
            ) from error
    if plan.num_nodes > 1:
        check_address(plan)
    code: object
    ending: SystemExit | None = None
    try:
        if plan.mode == "in place":
            code = _run_in_place(plan)
        else:
            with environ.exported(**plan.environment), ExitStack() as stack:
                preloader = None
                if plan.preload:
                    from drivetrain_launcher.run.preload.preloader import Preloader

                    preloader = stack.enter_context(Preloader(plan))
                from drivetrain_launcher.run.elastic import run_elastic  # while the preloader imports

                code = run_elastic(plan, preloader)
    except SystemExit as stop:  # of a script in this process
        code, ending = stop.code, stop
    except KeyboardInterrupt:  # before the agent installs its signal handlers
        if plan.mode == "in place":
            raise
        say("interrupted before a rank was started")
        code = 130
    shown = requeue_after(code, plan)
    if ending is not None:
        raise ending
    return shown


def check_address(plan: LaunchPlan, *, patience_seconds: float = _NAME_SECONDS) -> None:
    """Check that node 0's name has an address. In a job, node 0 warns if the address is another machine's.

    In a job the name may get its address after the nodes start, as the names of pods do.
    """
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
                    f"({error}): correct the name's entry in DNS or /etc/hosts, {remedy}"
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


def _run_in_place(plan: LaunchPlan) -> int:
    """Run the only rank in this process, with torchrun's variables and a port that is currently free."""
    (rank,) = plan.ranks()
    environment: dict[str, str | None] = dict(rank.environment)
    if not plan.has_ranks:  # what an agent told a parent process, such as that it hosts the store
        around = [name for name in environ.child_environment() if name.startswith("TORCHELASTIC_")]
        environment |= dict.fromkeys(around)
    if environment.get("MASTER_PORT") == ANY_PORT:
        import _socket  # importing socket takes tens of milliseconds longer

        probe = _socket.socket()
        probe.bind((plan.master_addr, 0))
        environment["MASTER_PORT"] = str(probe.getsockname()[1])
        probe.close()
    if rank.binding is not None:
        os.sched_setaffinity(0, rank.binding.cpus)
    program = plan.target.name
    if plan.target.kind == "program":
        try:
            os.execvpe(program, plan.command, environ.child_environment(**environment))
        except OSError as error:
            raise LaunchError(
                f"{program}: {error.strerror}; --program starts it as it is, without Python"
            ) from error
    with environ.exported(**environment):
        run_as_main(program, plan.target.arguments, is_module=plan.target.kind == "module")
    return 0


def requeue_after(code: object, plan: LaunchPlan) -> int:
    """Return the exit code for the shell; have the cluster start the job again if all ranks have saved.

    Called by every launcher of the job, with the exit code of its ranks or the script's argument of `sys.exit`. The
    launcher of task 0 asks the cluster. A cluster may stop a job as soon as a task ends with an error. So the others
    wait until the cluster stops them, or until the time to save is over: task 0 must be able to ask before that.
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
