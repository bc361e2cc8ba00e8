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

# Module -> its public names. Not by drivetrain_messages: the keeper's process sees this package alone.
_NAMES = {
    "errors": "LaunchError RankFailedError",
    "plan.host_detection": "detect_host Host",
    "plan.launch_plan": "LaunchPlan LaunchTarget RankPlan",
    "plan.launch_planner": "plan_launch",
    "run.notebook.launchers": "debug_launcher notebook_launcher",
    "run.notebook.workers": "Workers",
    "run.run": "run_plan",
    "settings": "LaunchSettings",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"drivetrain_launcher.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'drivetrain_launcher' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
