"""The checks of a launch before any process starts, so that a mistake is reported early and only once."""

import ast
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from drivetrain_config import ConfigError, Layers, flags, sections
from drivetrain_config.files.settings_file import check_json_object
from drivetrain_config.plugins.installed import entry_points
from drivetrain_config.settings.plugin_names import check_plugins, word_pattern
from drivetrain_launcher.cli.flag_aliases import RENAMED
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.launch_plan import LaunchTarget
from drivetrain_launcher.plan.resolved_launch import GivenSetting, ResolvedLaunch
from drivetrain_launcher.settings import LaunchSettings
from drivetrain_messages import say, suggest

# In addition to the launcher's own flags: looking up those of every installed package would import each.
_OFTEN_MISPLACED = frozenset(
    {"--config", "--dry-run", "--backend", "--cpu", "--mixed-precision", "--gradient-accumulation-steps"}
)
# Takes a script; returns why it must not run as it is, after the line that says so, or None.
ScriptCheck = Callable[[ast.Module, ResolvedLaunch], str | None]


def check_parallel(resolved: ResolvedLaunch, world_size: int) -> None:
    """Reject sizes of parallel dimensions that the backend does not have, or that do not fit the processes."""
    if (dims := resolved.sections.get("parallel")) is not None:
        backend = str(resolved.sections["run"].value.backend) if "run" in resolved.sections else ""
        settings = sections(only={backend}).get(backend)  # a backend has the name of its section
        try:
            dims.value.check_axes(backend, getattr(settings, "refused_axes", {}))
            dims.value.plan(world_size)
        except ValueError as error:
            raise LaunchError(f"the section parallel: {error}") from None


def check_launch(resolved: ResolvedLaunch, target: LaunchTarget) -> None:
    """Reject a launch that would fail on every rank, and report launcher flags that follow the script."""
    check_device(resolved.layers)
    check_bound_devices(resolved)
    folder, path, through = Path.cwd(), Path(target.name), resolved.launch.through
    if target.kind == "module":
        check_module(target.name, folder)
    elif target.kind == "program":
        from shutil import which  # few launches run a program

        if which(target.name) is None:
            raise LaunchError(f"--program {target.name}: no such program, here or on PATH")
    else:
        check_script(path, where=f" (looked for {path.absolute()})")
    if through is not None and not _is_there(package := through.partition(".")[0], folder):
        raise LaunchError(  # most packages have the name of their module
            f"--through {through}: the module {package} is not installed; pip install {package.replace('_', '-')}, "
            "or name another module that runs a script"
        )
    has_flags = any(argument.startswith("--") for argument in target.arguments)
    source = None
    if (resolved.given or has_flags) and target.kind == "script" and path.is_file():
        source = path.read_text(encoding="utf-8", errors="replace")
    if has_flags and through is None:  # what a script takes that another module runs is its affair
        known = {flag.name for flag in flags(LaunchSettings, "launch")} | _OFTEN_MISPLACED
        report_misplaced(target, known, source, command="launch")
    check_given(resolved.given, source)
    tree = ast.Module([], [])
    with suppress(SyntaxError, ValueError):  # Python reports it when the script runs
        tree = ast.parse(source or "")
    for point in entry_points("drivetrain.script_checks") if through is None else ():
        if (problem := cast("ScriptCheck", point.load())(tree, resolved)) is not None:
            raise LaunchError(f"{path}:{problem}")


def check_script(path: Path, *, where: str = "", remedy: str = "") -> None:
    """Reject a missing script; the message gives the nearest name in its folder."""
    if not path.exists():
        beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = suggest(path.name, beside, show=path.with_name)
        raise LaunchError(f"{path}: no such script{where}{hint}{remedy}")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise LaunchError(
            f"{path}: a folder without __main__.py; name the script in it, {path / 'SCRIPT.py'}, or a module with -m"
        )


def check_module(name: str, folder: Path) -> None:
    """Reject a module whose package is neither installed nor in the folder from which modules are run.

    Modules within a package are not searched for, since a search would import the package.
    """
    if name.endswith(".py") and (folder / name).is_file():
        raise LaunchError(f"-m {name}: this is a script, not a module; leave out -m")
    package = name.partition(".")[0]
    if _is_there(package, folder):
        return
    beside = [each.name for each in folder.iterdir() if each.is_dir() or each.suffix == ".py"]
    rest = name.removeprefix(package)
    hint = suggest(package, [name.removesuffix(".py") for name in beside], show=lambda near: f"{near}{rest}")
    raise LaunchError(f"-m {name}: there is no module {package} in {folder}, nor one that is installed{hint}")


def _is_there(package: str, folder: Path) -> bool:
    try:
        return bool(PathFinder.find_spec(package, [str(folder)]) or find_spec(package))
    except (ImportError, ValueError):  # not a name, or a module without a spec
        return False


def report_misplaced(
    target: LaunchTarget, known: Collection[str], source: str | None, *, command: str
) -> None:
    """Report flags of `drivetrain COMMAND` that stand among the script's arguments, and so go to the script."""
    if misplaced := misplaced_flags(target.arguments, known, source or ""):
        stand, them = ("stand", "them") if len(misplaced) > 1 else ("stands", "it")
        say(
            f"{', '.join(misplaced)} {stand} after {target.name}, so the script gets {them} and the launcher does "
            f"not; put the launcher's flags before the script: drivetrain {command} [flags] {target.name}"
        )


def misplaced_flags(arguments: Iterable[str], known: Collection[str], script: str) -> list[str]:
    """Return the `known` flags that stand among the script's arguments, as written, without duplicates.

    A flag, argument or field that the source of the script defines is the script's own.
    """
    found: dict[str, None] = {}
    for token in arguments:
        written = token.partition("=")[0]
        if token == "--":
            break
        hyphened = written.replace("_", "-")
        if not written.startswith("--") or RENAMED.get(hyphened, hyphened) not in known:
            continue
        word = word_pattern(hyphened.removeprefix("--"))
        # Access to an attribute of that name does not count.
        own = (rf"--{word}(?!\w)", rf"""["']{word}["']""", rf"(?<![\w.]){word}\s*[:=]")
        if not any(re.search(each, script) for each in own):
            found[written] = None
    return list(found)


def check_given(given: Iterable[GivenSetting], source: str | None) -> None:
    """Reject unknown plug-ins, and JSON files that are missing or hold no JSON object.

    A plug-in is known if an installed package or the script registers it. `source` is the script's source code; None
    if it is not available.
    """
    for setting in given:
        check_plugins(setting.spec, setting.value, setting.source, script=source)
        if setting.spec.is_json_file and isinstance(setting.value, Path):
            try:
                check_json_object(setting.value)
            except ConfigError as error:
                name = f"{setting.spec.section}.{setting.spec.name}"
                raise LaunchError(f"{name}: {error}; from {setting.source}") from error


def check_device(layers: Layers) -> None:
    """Reject a device and `run.cpu` if the same layer sets both; a higher layer may override a lower one."""
    cpu, device = layers.of_section("run").get("cpu", ()), layers.of_section("state").get("device", ())
    if not (cpu and device) or cpu[0].source.kind != device[0].source.kind:
        return
    if str(cpu[0].value).lower() in ("true", "1", "yes", "on") and device[0].value not in ("auto", "cpu"):
        raise LaunchError(
            f"run.cpu={cpu[0].value} (from {cpu[0].source}) contradicts state.device={device[0].value!r} (from "
            f"{device[0].source}); keep one of the two"
        )


def check_bound_devices(resolved: ResolvedLaunch) -> None:
    """Refuse to launch more processes on this node than the cluster has allocated accelerators to this task."""
    launch, place = resolved.launch, resolved.placement
    if place is None or not place.devices or resolved.device == "cpu":
        return
    bound, sources = len(place.devices), resolved.sections["launch"].sources
    if place.is_one_task_per_rank:
        if bound == 1:  # each task may well have its own; with several, tasks share what they see
            return
        count, source = place.tasks_per_node, f"{place.source('tasks_per_node')}={place.tasks_per_node}"
    elif launch.processes_per_node is not None:
        count = launch.processes_per_node
        source = f"processes_per_node={count} from {sources['processes_per_node']}"
    elif launch.num_processes is not None:
        count = launch.num_processes // launch.num_nodes
        said = f"num_processes={launch.num_processes} from {sources['num_processes']}"
        source = f"{said}, over {launch.num_nodes} nodes"
    else:
        return
    if count > bound:
        raise LaunchError(
            f"{count} processes on this node ({source}), but {place.cluster} bound this task to {bound} "
            f"accelerators, {place.source('devices')}={','.join(place.devices)}: start at most {bound}, ask the "
            "cluster for more, or say --cpu to train on the CPU"
        )
