"""Run a plan: in this process, by replacing it with a program, or with torch's agent."""

import os
from contextlib import ExitStack

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.launch_plan import ANY_PORT, LaunchPlan
from drivetrain_launcher.run.job import check_address, requeue_after
from drivetrain_launcher.run.runpy_main import run_as_main
from drivetrain_messages import say


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
    check_address(plan)
    if plan.mode == "in place":
        return _run_in_place(plan)
    try:
        with ExitStack() as stack:
            preloader = None
            if plan.preload:
                from drivetrain_launcher.run.preload.preloader import Preloader

                preloader = stack.enter_context(Preloader(plan))
            from drivetrain_launcher.run.elastic import run_elastic  # while the preloader imports

            code = run_elastic(plan, preloader)
    except KeyboardInterrupt:  # before the agent installs its signal handlers
        say("interrupted before a rank was started")
        code = 130
    return requeue_after(code, plan)


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
        try:
            run_as_main(program, plan.target.arguments, is_module=plan.target.kind == "module")
        except SystemExit as ending:
            requeue_after(ending.code, plan)
            raise
    return 0
