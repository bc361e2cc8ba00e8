"""Launch a script on many processes."""

import sys
from dataclasses import dataclass, field, replace

from drivetrain_config import Layers
from drivetrain_config.plugins.installed import entry_points
from drivetrain_launcher.cli.preflight import check_launch, check_parallel
from drivetrain_launcher.plan.host_detection import detect_cpu_topology, detect_host
from drivetrain_launcher.plan.launch_plan import LaunchTarget
from drivetrain_launcher.plan.launch_planner import plan_launch
from drivetrain_launcher.plan.resolved_launch import find_own_placement, resolve_launch
from drivetrain_launcher.run.run import run_plan
from drivetrain_messages import argument

TOPIC = "Run"  # in `drivetrain --help`

# Entry points of modules that scripts run through: what they need imported first in the process of `--preload`.
PRELOAD_GROUP = "drivetrain.preload"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArguments:
    """The arguments of `drivetrain launch`."""

    script: str = argument(
        ..., "Script to run; a module's name with -m, a program with --program.", positional=True
    )
    arguments: tuple[str, ...] = argument(
        (), "The script's own arguments, handed to it untouched.", rest=True
    )
    dry_run: bool = argument(
        False, "Print the plan and start nothing; it has each rank's command and environment."
    )
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"finds_file": True})


def run(arguments: LaunchArguments) -> int:
    """Launch a script on many processes, here or on many machines."""
    placement = find_own_placement(arguments.layers)
    resolved = resolve_launch(arguments.layers, placement=placement)
    launch = resolved.launch
    target = LaunchTarget(name=arguments.script, arguments=arguments.arguments, kind=launch.target_kind)
    check_launch(resolved, target)
    if launch.through is not None:
        words = (*(("-m",) if launch.module else ()), target.name, *target.arguments)
        target = LaunchTarget(name=launch.through, arguments=words, kind="module")
        if launch.preload:
            first = [point.value for point in entry_points(PRELOAD_GROUP) if point.name == launch.through]
            launch = replace(launch, preload=(*first, *launch.preload))
    host = detect_host(resolved.device)
    if launch.bind != "none":
        visible = [str(each) for each in launch.devices] or (host.visible_devices or "").split(",")
        topology = detect_cpu_topology(host.accelerator, visible=[each for each in visible if each])
        host = replace(host, cpu_topology=topology)
    plan = plan_launch(launch, target, host, handed_down=resolved.layers.to_json(), placement=placement)
    if plan.min_nodes is None:  # an elastic run has other numbers of processes later
        check_parallel(resolved, plan.world_size)
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
