"""The checks before any process starts, so that a mistake is reported early and only once."""

import re
from collections.abc import Collection, Iterable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from drivetrain_config import ConfigError, Layers
from drivetrain_config.files.settings_file import check_json_object
from drivetrain_config.settings.plugin_names import check_plugins, word_pattern
from drivetrain_launcher.cli.flag_aliases import RENAMED
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.resolved_launch import GivenSetting
from drivetrain_messages import suggest


def check_module(name: str, folder: Path) -> None:
    """Reject a module whose package is not there, before every rank does.

    Args:
        name: The name of the module to run. Modules within a package are not looked for, since that imports it.
        folder: The folder that modules are run from, whose own come first.

    Raises:
        LaunchError: There is no such module.
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


def check_through(name: str, folder: Path) -> None:
    """Reject a module to run the script through that is not there, before every rank does.

    Args:
        name: The name of the module.
        folder: The folder that modules are run from.

    Raises:
        LaunchError: There is no such module; the message says which package has it, by the name of the module.
    """
    package = name.partition(".")[0]
    if not _is_there(package, folder):
        raise LaunchError(
            f"--through {name}: the module {package} is not installed; pip install {package.replace('_', '-')}, or "
            "name another module that runs a script"
        )


def _is_there(package: str, folder: Path) -> bool:
    try:
        return bool(PathFinder.find_spec(package, [str(folder)]) or find_spec(package))
    except (ImportError, ValueError):  # not a name, or a module without a spec
        return False


def misplaced_flags(arguments: Iterable[str], known: Collection[str], script: str) -> list[str]:
    """Return the launcher's flags found among the script's arguments, as written, without duplicates.

    Args:
        arguments: The tokens after the script on the command line.
        known: The names of the launcher's flags.
        script: The source of the script; a flag, argument or field defined in it is the script's own.
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


def check_plugins_of(given: Iterable[GivenSetting], script: str | None) -> None:
    """Reject a name that no installed package provides, such as a backend's, unless the script may register it.

    Args:
        given: The settings given outside the script; installed names are looked up for these alone.
        script: The source of the script, which may register plug-ins of its own; None if it is not available.

    Raises:
        ConfigError: There is no such plug-in; the message gives the nearest name, and lists all.
    """
    for setting in given:
        check_plugins(setting.spec, setting.value, setting.source, script=script)


def check_files(given: Iterable[GivenSetting]) -> None:
    """Reject a file that a setting names and that is not there, or holds no JSON, before every rank does.

    Raises:
        LaunchError: The file is missing or holds something else; the message says who names it.
    """
    for setting in given:
        if not (setting.spec.is_json_file and isinstance(setting.value, Path)):
            continue
        try:
            check_json_object(setting.value)
        except ConfigError as error:
            name = f"{setting.spec.section}.{setting.spec.name}"
            raise LaunchError(f"{name}: {error}; from {setting.source}") from error


def check_device(layers: Layers) -> None:
    """Reject a device beside `run.cpu` where one layer sets both; a higher layer may well override a lower one.

    Raises:
        LaunchError: If the two contradict each other; the message gives both values with their sources.
    """
    cpu, device = layers.of_section("run").get("cpu", ()), layers.of_section("state").get("device", ())
    if not (cpu and device) or cpu[0].source.kind != device[0].source.kind:
        return
    if str(cpu[0].value).lower() in ("true", "1", "yes", "on") and device[0].value not in ("auto", "cpu"):
        raise LaunchError(
            f"run.cpu={cpu[0].value} (from {cpu[0].source}) contradicts state.device={device[0].value!r} (from "
            f"{device[0].source}); keep one of the two"
        )
