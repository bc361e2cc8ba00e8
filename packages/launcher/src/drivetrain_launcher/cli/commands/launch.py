"""Run a script on one process or many, on one machine or many."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drivetrain_clusters.protocol import JobPlacement
from drivetrain_clusters.registry import find_placement
from drivetrain_config import Layers, environ, flags, resolve, sections
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
from drivetrain_launcher.plan.host_detection import Host, detect_host
from drivetrain_launcher.plan.launch_plan import LaunchTarget
from drivetrain_launcher.plan.launch_planner import plan_launch
from drivetrain_launcher.plan.placed_settings import asked_processes, check_devices, place_layers
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
    placement = find_place(arguments.layers)
    layers = arguments.layers if placement is None else place_layers(arguments.layers, placement)
    settings = resolve_said(layers)
    check_device(arguments.layers)
    launch: LaunchSettings = settings["launch"]
    target = _target(arguments, launch)
    _check(layers, settings, target)
    device = _device(settings)
    if placement is not None:
        sources = resolve(LaunchSettings, section="launch", layers=layers).sources
        count, source = asked_processes(launch, sources, placement)
        check_devices(placement, processes=count, source=source, wants_cpu=device == "cpu")
    if launch.through is not None:
        check_through(launch.through, Path.cwd())
        target = target.through(launch.through)
        launch = replace(
            launch, preload=(*_prepared_by(launch.through), *launch.preload) if launch.preload else ()
        )
    plan = plan_launch(
        launch, target, _host(launch, device), handed_down=layers.to_json(), placement=placement
    )
    plan = replace(
        plan,
        notes=(*file_notes(arguments.layers), *plan.notes),
        standstill_seconds=settings["state"].timeout_seconds,  # when the other ranks give up
    )
    if arguments.dry_run:
        sys.stdout.write(f"{plan}\n")
        return 0
    return run_plan(plan)


def _prepared_by(through: str) -> tuple[str, ...]:
    """Return the modules to import before all others where ranks are forked and run through a module."""
    return tuple(point.value for point in entry_points(PRELOAD_GROUP) if point.name == through)


def find_place(layers: Layers) -> JobPlacement | None:
    """Return the place of this process in a cluster's job; None outside any job, and with `launch.cluster="none"`.

    A launcher around this one that has set the ranks, such as torchrun, decides in place of the cluster.

    Raises:
        LaunchError: There is no such cluster, or the variables of the job are missing or contradict each other.
    """
    entries = layers.of_section("launch").get("cluster")
    asked = str(entries[0].value) if entries else "auto"
    environment = environ.child_environment()
    if asked == "none" or {"RANK", "LOCAL_RANK"} <= environment.keys():
        return None
    return find_placement(environment, asked=asked)


def resolve_said(layers: Layers) -> dict[str, Any]:
    """Resolve `launch`, `state` and every section that is set, so that errors appear once here, not on each rank."""
    said = {section for section, _ in layers.entries} | {"launch", "state"}
    return {
        name: resolve(section, section=name, layers=layers).value
        for name, section in sections(only=said).items()
    }


def _check(layers: Layers, settings: dict[str, Any], target: LaunchTarget) -> None:
    """Reject unknown plug-ins before any worker does, and report launcher flags that follow the script."""
    has_flags = any(argument.startswith("--") for argument in target.arguments)
    if not layers.entries and not has_flags:
        return
    script = None
    if target.kind == "script" and Path(target.name).is_file():
        script = Path(target.name).read_text(encoding="utf-8", errors="replace")
    check_plugins_of(layers, settings, script)
    check_files(layers, settings)
    if (
        not has_flags or settings["launch"].through
    ):  # what a script takes that another module runs is its affair
        return
    known = {flag.name for flag in flags(LaunchSettings, "launch")} | _OFTEN_MISPLACED
    if misplaced := misplaced_flags(target.arguments, known, script or ""):
        stand, them = ("stand", "them") if len(misplaced) > 1 else ("stands", "it")
        say(
            f"{', '.join(misplaced)} {stand} after {target.name}, so the script gets {them} and the launcher does "
            f"not; put the launcher's flags before the script: drivetrain launch [flags] {target.name}"
        )


def file_notes(layers: Layers) -> tuple[str, ...]:
    """Return a note of a settings file that the user did not name."""
    if layers.file is None or layers.file.place is None:
        return ()
    return (f"settings from {layers.file}; --config none leaves them out",)


def _device(settings: dict[str, Any]) -> str:
    """Return the requested kind of device; `run.cpu` exists only if the umbrella package is installed."""
    wants_cpu = "run" in settings and settings["run"].cpu
    return "cpu" if wants_cpu else settings["state"].device


def _host(launch: LaunchSettings, device: str) -> Host:
    """Return this host, with its cores if ranks are to be bound to them."""
    host = detect_host(device)
    if launch.bind == "none":
        return host
    from drivetrain_launcher.plan.cpu_topology import detect_cpu_topology  # few launches bind

    visible = [str(each) for each in launch.devices] or (host.visible_devices or "").split(",")
    topology = detect_cpu_topology(host.accelerator, visible=[each for each in visible if each])
    return replace(host, cpu_topology=topology)


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
