"""Carry out a plan: in this process, by becoming a program, or with torch's agent."""

import os

from drivetrain_config import environ
from drivetrain_launcher.as_main import run_as_main
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan import LaunchPlan
from drivetrain_launcher.saying import say


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
    if plan.target.kind == "program":
        _become(plan)
    with environ.exported(**plan.environment):
        run_as_main(plan.target.name, plan.target.arguments, is_module=plan.target.kind == "module")
    return 0


def _run_under_agent(plan: LaunchPlan) -> int:
    try:
        from drivetrain_launcher.elastic import run_elastic

        return run_elastic(plan)
    except KeyboardInterrupt:  # before the agent took over the signals
        say("interrupted before a rank was started")
        return 130


def _become(plan: LaunchPlan) -> None:
    program = plan.target.name
    try:
        os.execvpe(program, plan.command, environ.child_environment(**plan.environment))
    except OSError as error:
        raise LaunchError(
            f"{program}: {error.strerror}; --program starts it as it is, without Python"
        ) from error
