"""Carry out a plan: in this process, by becoming a program, or with torch's agent."""

import os
from collections.abc import Mapping

from drivetrain_config import environ
from drivetrain_launcher.console import say
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.plan import ANY_PORT, LaunchPlan
from drivetrain_launcher.run.runpy_main import run_as_main


def run_plan(plan: LaunchPlan) -> int:
    """Run a plan to its end.

    Returns:
        The exit code for the shell. A plan in place does not return: the script's end is the process's.

    Raises:
        LaunchError: The plan cannot be carried out here.
        SystemExit: The script ran in place, and this is how it ended.
    """
    for note in plan.notes:
        say(note)
    if plan.mode == "elastic":
        return _run_under_agent(plan)
    environment = _environment_in_place(plan)
    if plan.target.kind == "program":
        _become(plan, environment)
    with environ.exported(**environment):
        run_as_main(plan.target.name, plan.target.arguments, is_module=plan.target.kind == "module")
    return 0


def _run_under_agent(plan: LaunchPlan) -> int:
    try:
        from drivetrain_launcher.run.elastic import run_elastic

        return run_elastic(plan)
    except KeyboardInterrupt:  # before the agent took over the signals
        say("interrupted before a rank was started")
        return 130


def _environment_in_place(plan: LaunchPlan) -> dict[str, str]:
    """Return what the one process finds in its environment: torchrun's variables, with a port that is free now."""
    environment = dict(plan.ranks()[0].environment)
    if environment.get("MASTER_PORT") == ANY_PORT:
        environment["MASTER_PORT"] = str(_free_port(plan.master_addr))
    return environment


def _free_port(address: str) -> int:
    import _socket  # the module around it takes tens of milliseconds, and is not needed for a number

    probe = _socket.socket()
    try:
        probe.bind((address, 0))
        return probe.getsockname()[1]
    finally:
        probe.close()


def _become(plan: LaunchPlan, environment: Mapping[str, str]) -> None:
    program = plan.target.name
    try:
        os.execvpe(program, plan.command, environ.child_environment(**environment))
    except OSError as error:
        raise LaunchError(
            f"{program}: {error.strerror}; --program starts it as it is, without Python"
        ) from error
