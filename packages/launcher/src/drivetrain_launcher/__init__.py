"""The drivetrain command and its parts: launch plans, torch's elastic agent, notebook launchers.

A plan (`plan_launch`) gives the command and environment of every rank; `run_plan` executes it. Importing this
package, reading its settings and running a single process do not import torch in the launcher.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_launcher.errors import LaunchError as LaunchError
    from drivetrain_launcher.errors import RankFailedError as RankFailedError
    from drivetrain_launcher.plan.host_detection import Host as Host
    from drivetrain_launcher.plan.host_detection import detect_host as detect_host
    from drivetrain_launcher.plan.launch_plan import LaunchPlan as LaunchPlan
    from drivetrain_launcher.plan.launch_plan import LaunchTarget as LaunchTarget
    from drivetrain_launcher.plan.launch_plan import RankPlan as RankPlan
    from drivetrain_launcher.plan.launch_planner import plan_launch as plan_launch
    from drivetrain_launcher.run.notebook.launchers import debug_launcher as debug_launcher
    from drivetrain_launcher.run.notebook.launchers import notebook_launcher as notebook_launcher
    from drivetrain_launcher.run.notebook.workers import Workers as Workers
    from drivetrain_launcher.run.run import run_plan as run_plan
    from drivetrain_launcher.settings import LaunchSettings as LaunchSettings

# Public name -> the module that defines it.
_MODULES = {
    "Host": "plan.host_detection",
    "LaunchError": "errors",
    "LaunchPlan": "plan.launch_plan",
    "LaunchSettings": "settings",
    "RankFailedError": "errors",
    "RankPlan": "plan.launch_plan",
    "LaunchTarget": "plan.launch_plan",
    "Workers": "run.notebook.workers",
    "debug_launcher": "run.notebook.launchers",
    "detect_host": "plan.host_detection",
    "notebook_launcher": "run.notebook.launchers",
    "plan_launch": "plan.launch_planner",
    "run_plan": "run.run",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"drivetrain_launcher.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'drivetrain_launcher' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
