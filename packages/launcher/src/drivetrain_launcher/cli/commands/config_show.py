"""Show every setting in force as YAML, each with its source."""

import sys
from dataclasses import dataclass, field
from typing import Any

from drivetrain_config import Layers, Source, resolve, sections
from drivetrain_config.settings.schema import specs
from drivetrain_config.values.kinds import plain
from drivetrain_launcher.wizard.questionnaire import in_order
from drivetrain_launcher.wizard.settings_text import yaml_value

_MOST_COLUMNS = 48  # where a source stands, unless its setting is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigShowArguments:
    """The arguments of `drivetrain config show`."""

    defaults: bool = field(default=True, metadata={"help": "Show the settings that nobody has set, too."})
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"finds_file": True})


def run(arguments: ConfigShowArguments) -> int:
    """Show every setting in force as YAML, each with its source; secrets are hidden."""
    file = arguments.layers.file
    sys.stdout.write(f"# file: {'none' if file is None else file}\n")
    kinds = sections()
    for name in in_order(kinds):
        lines = _lines(name, kinds[name], arguments)
        if lines:
            sys.stdout.write("\n".join([f"{name}:", *lines, ""]))
    return 0


def _lines(name: str, kind: type[Any], arguments: ConfigShowArguments) -> list[str]:
    resolved = resolve(kind, section=name, layers=arguments.layers)
    lines: list[str] = []
    for spec in specs(kind, name):
        source: Source = resolved.sources[spec.name]
        if source.kind == "default" and not arguments.defaults:
            continue
        value = getattr(resolved.value, spec.name)
        if spec.secret and value is not None:
            lines.append(f"  # {spec.name}: a secret, from {source}")
            continue
        text = f"  {spec.name}: {yaml_value(plain(value))}"
        lines.append(f"{text:<{_MOST_COLUMNS}}  # {source}")
    return lines
