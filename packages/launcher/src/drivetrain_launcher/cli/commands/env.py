"""Show versions, devices, and every setting."""

import json
import os
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

_LIBRARIES = ("deepspeed", "transformers")
_SHOWN = ("drivetrain", *_LIBRARIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvArguments:
    """The arguments of `drivetrain env`."""

    json: bool = argument(False, "Print JSON, for programs and bug reports.")
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"finds_file": True})


def run(arguments: EnvArguments) -> int:
    """Show versions, devices, and every setting with its source."""
    from drivetrain_state import describe_environment

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report: dict[str, Any] = {
        "versions": {"python": platform.python_version(), "platform": platform.platform(), **_versions()},
        "devices": [*describe_environment().splitlines(), f"CPU cores: {usable} of {os.cpu_count()} usable"],
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
    sys.stdout.write(f"{json.dumps(report, indent=2) if arguments.json else _text(report)}\n")
    return 0


def _versions() -> dict[str, str]:
    """Return the versions of torch, of what it was built with, and of the packages that matter to a run, by name."""
    from importlib.metadata import distributions

    import torch.cuda.nccl

    installed = {each.name: each.version for each in distributions() if each.name.partition("-")[0] in _SHOWN}
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    has_nccl = torch.distributed.is_nccl_available()
    return {
        "torch": torch.__version__,
        "torch built for": next((f"{kind} {text}" for kind, text in kinds.items() if text), "the CPU alone"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "not in this build of torch",
        **dict.fromkeys(_LIBRARIES, "not installed"),
        **dict(sorted(installed.items())),
    }


def _text(report: dict[str, Any]) -> str:
    """Return the report for people: what was set comes first, and packages of one version are one line."""
    versions: dict[str, str] = report["versions"]
    own = {name: version for name, version in versions.items() if name.partition("-")[0] == "drivetrain"}
    if len(set(own.values())) == 1:
        versions = {name: version for name, version in versions.items() if name not in own}
        versions["drivetrain"] = f"{next(iter(own.values()))}, all {len(own)} packages"
    lines = [format_table(list(versions.items())), "", "devices"]
    lines += [f"  {line}" for line in report["devices"]]
    lines += ["", "settings files, of which the first is used"]
    lines += [f"  {path}: {state}" for path, state in report["settings_files"].items()]
    chosen: list[tuple[str, str, str]] = []
    defaults: list[str] = []
    for section, settings in report["settings"].items():
        rows: list[tuple[str, str]] = []
        for name, setting in settings.items():
            value, source = json.dumps(setting["value"]), str(Source(setting["source"], setting["where"]))
            if source == "default":
                rows.append((name, value))
            else:
                chosen.append((f"{section}.{name}", value, source))
        defaults += ["", section, format_table(rows, indent="  ")] if rows else []
    table = format_table(chosen, indent="  ") if chosen else "  none"
    lines += ["", "settings that are not the default", table, "", "settings that are the default, by section"]
    return "\n".join([*lines, *defaults])


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
