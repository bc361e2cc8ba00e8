"""Show versions, devices, and every setting."""

import json
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain_config import Layers, Source, environ, resolve, sections
from drivetrain_config.files.found_file import settings_places
from drivetrain_config.settings.schema import specs
from drivetrain_config.values.kinds import plain
from drivetrain_messages import argument, format_table

TOPIC = "Set up"  # in `drivetrain --help`


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvArguments:
    """The arguments of `drivetrain env`."""

    json: bool = argument(
        False, "Print JSON, for programs and bug reports.", brief="Print JSON, for programs and bug reports"
    )
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"finds_file": True})


def run(arguments: EnvArguments) -> int:
    """Show versions, devices, and every setting with its source."""
    from importlib.metadata import distributions

    from drivetrain_state import describe_environment

    versions = {
        each.name: each.version
        for each in sorted(distributions(), key=lambda each: each.name)
        if each.name == "torch" or each.name.partition("-")[0] == "drivetrain"
    }
    report: dict[str, Any] = {
        "versions": {"python": platform.python_version(), "platform": platform.platform(), **versions},
        "devices": describe_environment().splitlines(),
        "settings_files": _settings_files(arguments.layers),
        "settings": {},
    }
    for section, kind in sections().items():
        resolved = resolve(kind, section=section, layers=arguments.layers)
        report["settings"][section] = {
            spec.name: {
                "value": "(secret)" if spec.secret else plain(getattr(resolved.value, spec.name)),
                "source": resolved.sources[spec.name].kind,
                "where": resolved.sources[spec.name].where,
            }
            for spec in specs(kind, section)
        }
    if arguments.json:
        sys.stdout.write(f"{json.dumps(report, indent=2)}\n")
        return 0
    lines = [f"{name} {version}" for name, version in report["versions"].items()]
    lines += ["", "devices", *(f"  {line}" for line in report["devices"])]
    lines += ["", "settings files, of which the first is used"]
    lines += [f"  {path}: {state}" for path, state in report["settings_files"].items()]
    for section, settings in report["settings"].items():
        rows = [
            (name, json.dumps(setting["value"]), str(Source(setting["source"], setting["where"])))
            for name, setting in settings.items()
        ]
        lines += ["", section, format_table(rows, indent="  ")]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def _settings_files(layers: Layers) -> dict[str, str]:
    """Return each place of a settings file, in search order, with its state: used, not used or no file."""
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
