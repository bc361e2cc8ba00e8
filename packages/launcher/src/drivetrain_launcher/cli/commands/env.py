"""Show versions, devices, and every setting with its source."""

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from drivetrain_config import Layers, Source, environ, resolve, sections
from drivetrain_config.files.found_file import settings_places
from drivetrain_config.values.kinds import plain
from drivetrain_messages import format_table


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvArguments:
    """The arguments of `drivetrain env`."""

    json: bool = field(default=False, metadata={"help": "Print JSON, for programs and bug reports."})
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"finds_file": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting with its current value.

    Attributes:
        value: The value as plain JSON data; a secret is hidden.
        source: The source of the value.
    """

    value: Any
    source: Source


def run(arguments: EnvArguments) -> int:
    """Show versions, devices, and every setting with its source."""
    settings = read_settings(arguments.layers)
    versions, devices = read_versions(), read_devices()
    if arguments.json:
        report = {
            "versions": versions,
            "devices": devices,
            "settings_files": read_places(arguments.layers),
            "settings": {
                section: {
                    name: {
                        "value": setting.value,
                        "source": setting.source.kind,
                        "where": setting.source.where,
                    }
                    for name, setting in found.items()
                }
                for section, found in settings.items()
            },
        }
        sys.stdout.write(f"{json.dumps(report, indent=2)}\n")
    else:
        sys.stdout.write(_as_text(versions, devices, read_places(arguments.layers), settings))
    return 0


def read_places(layers: Layers) -> dict[str, str]:
    """Return the places of settings files in their order, and what is there: used, not used or no file."""
    chosen = layers.file
    found: dict[str, str] = {}
    if chosen is not None and chosen.place is None:
        found[str(chosen.path)] = "used, named by --config"
    for place in settings_places(Path.cwd(), environ.child_environment()):
        there = place.file()
        is_used = chosen is not None and there == chosen.path
        state = "no file" if there is None else "used" if is_used else "not used"
        found.setdefault(str(place if there is None else there), f"{state}, {place.title}")
    return found


def read_versions() -> dict[str, str]:
    """Return the versions of Python, torch and every installed drivetrain package, and the platform."""
    from importlib.metadata import distributions

    ours = {
        distribution.name: distribution.version
        for distribution in distributions()
        if distribution.name == "torch" or distribution.name.partition("-")[0] == "drivetrain"
    }
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **dict(sorted(ours.items())),
    }


def read_devices() -> list[str]:
    """Return one line per kind of device on this machine."""
    from drivetrain_state import describe_environment

    return describe_environment().splitlines()


def read_settings(layers: Layers) -> dict[str, dict[str, Setting]]:
    """Return every field of every installed section, with its source; the values of secrets are hidden.

    Raises:
        ConfigError: If a value is invalid.
    """
    found: dict[str, dict[str, Setting]] = {}
    for section, kind in sections().items():
        resolved = resolve(kind, section=section, layers=layers)
        found[section] = {
            each.name: Setting(
                value="(secret)"
                if each.metadata.get("secret")
                else plain(getattr(resolved.value, each.name)),
                source=resolved.sources[each.name],
            )
            for each in fields(kind)
        }
    return found


def _as_text(
    versions: Mapping[str, str],
    devices: list[str],
    places: Mapping[str, str],
    settings: Mapping[str, Mapping[str, Setting]],
) -> str:
    lines = [f"{name} {version}" for name, version in versions.items()]
    lines += ["", "devices", *(f"  {line}" for line in devices)]
    lines += [
        "",
        "settings files, of which the first is used",
        *(f"  {path}: {state}" for path, state in places.items()),
    ]
    for section, found in settings.items():
        lines += ["", section]
        rows = [(name, json.dumps(setting.value), str(setting.source)) for name, setting in found.items()]
        lines.append(format_table(rows, indent="  "))
    return "\n".join([*lines, ""])
