"""Run a script on one process or many, on one machine or many."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from drivetrain_config import Layers, flags
from drivetrain_config.plugins.installed import entry_points
from drivetrain_launcher.cli.preflight import (
    check_device,
    check_files,
    check_module,
    check_plugins_of,
    check_through,
    misplaced_flags,
)
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.host_detection import detect_host
from drivetrain_launcher.plan.launch_plan import LaunchTarget
from drivetrain_launcher.plan.launch_planner import plan_launch
from drivetrain_launcher.plan.placed_settings import asked_processes, check_devices
from drivetrain_launcher.plan.resolved_launch import ResolvedLaunch, find_own_placement, resolve_launch
from drivetrain_launcher.run.run import run_plan
from drivetrain_launcher.settings import LaunchSettings
from drivetrain_messages import say, suggest

# Entry points of modules that scripts run through: what they need imported first in the process of `--preload`.
PRELOAD_GROUP = "drivetrain.preload"
# In addition to the launcher's own flags: looking up those of every installed package would import each.
_OFTEN_MISPLACED = frozenset(
    {"--config", "--dry-run", "--backend", "--cpu", "--mixed-precision", "--gradient-accumulation-steps"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArguments:
    """The arguments of `drivetrain launch`."""

    script: str = field(
        metadata={
            "positional": True,
            "help": "Script to run; a module's name with -m, a program with --program.",
        }
    )
    arguments: tuple[str, ...] = field(
        default=(), metadata={"rest": True, "help": "The script's own arguments, handed to it untouched."}
    )
    dry_run: bool = field(
        default=False,
        metadata={"help": "Print the plan, with each rank's command and environment; start nothing."},
    )
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"finds_file": True})


def run(arguments: LaunchArguments) -> int:
    """Run a script on one process or many, here or on many machines."""
    resolved = resolve_launch(arguments.layers, placement=find_own_placement(arguments.layers))
    check_device(resolved.layers)
    launch, placement = resolved.launch, resolved.placement
    target = _target(arguments, launch)
    _check(resolved, target)
    if placement is not None:
        count, source = asked_processes(launch, resolved.sections["launch"].sources, placement)
        check_devices(placement, processes=count, source=source, wants_cpu=resolved.device == "cpu")
    if launch.through is not None:
        check_through(launch.through, Path.cwd())
        target = target.through(launch.through)
        if launch.preload:
            first = [point.value for point in entry_points(PRELOAD_GROUP) if point.name == launch.through]
            launch = replace(launch, preload=(*first, *launch.preload))
    host = detect_host(resolved.device)
    if launch.bind != "none":
        from drivetrain_launcher.plan.cpu_topology import detect_cpu_topology  # few launches bind

        visible = [str(each) for each in launch.devices] or (host.visible_devices or "").split(",")
        topology = detect_cpu_topology(host.accelerator, visible=[each for each in visible if each])
        host = replace(host, cpu_topology=topology)
    plan = plan_launch(launch, target, host, handed_down=resolved.layers.to_json(), placement=placement)
    plan = replace(
        plan,
        notes=(*resolved.file_notes, *plan.notes),
        # When the other ranks give up.
        standstill_seconds=resolved.sections["state"].value.timeout_seconds,
    )
    if arguments.dry_run:
        sys.stdout.write(f"{plan}\n")
        return 0
    return run_plan(plan)


def _check(resolved: ResolvedLaunch, target: LaunchTarget) -> None:
    """Reject unknown plug-ins before any worker does, and report launcher flags that follow the script."""
    has_flags = any(argument.startswith("--") for argument in target.arguments)
    if not resolved.given and not has_flags:
        return
    script = None
    if target.kind == "script" and Path(target.name).is_file():
        script = Path(target.name).read_text(encoding="utf-8", errors="replace")
    check_plugins_of(resolved.given, script)
    check_files(resolved.given)
    if not has_flags or resolved.launch.through:  # what a script takes that another module runs is its affair
        return
    known = {flag.name for flag in flags(LaunchSettings, "launch")} | _OFTEN_MISPLACED
    if misplaced := misplaced_flags(target.arguments, known, script or ""):
        stand, them = ("stand", "them") if len(misplaced) > 1 else ("stands", "it")
        say(
            f"{', '.join(misplaced)} {stand} after {target.name}, so the script gets {them} and the launcher does "
            f"not; put the launcher's flags before the script: drivetrain launch [flags] {target.name}"
        )


def _target(arguments: LaunchArguments, launch: LaunchSettings) -> LaunchTarget:
    if launch.module:
        check_module(arguments.script, Path.cwd())
        return LaunchTarget(name=arguments.script, arguments=arguments.arguments, kind="module")
    if launch.program:
        from shutil import which  # few launches run a program

        if which(arguments.script) is None:
            raise LaunchError(f"--program {arguments.script}: no such program, here or on PATH")
        return LaunchTarget(name=arguments.script, arguments=arguments.arguments, kind="program")
    path = Path(arguments.script)
    if not path.exists():
        beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = suggest(path.name, beside, show=path.with_name)
        raise LaunchError(f"{arguments.script}: no such script (looked for {path.absolute()}){hint}")
    return LaunchTarget(name=arguments.script, arguments=arguments.arguments)
