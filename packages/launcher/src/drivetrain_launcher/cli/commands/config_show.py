"""Show every setting in force, each with its source."""

import sys
from dataclasses import dataclass, field

from drivetrain_config import Layers, resolve, sections
from drivetrain_config.settings.schema import specs
from drivetrain_config.values.kinds import plain
from drivetrain_launcher.wizard.questionnaire import in_order
from drivetrain_launcher.wizard.settings_text import yaml_value
from drivetrain_messages import argument

_MOST_COLUMNS = 48  # where a source stands, unless its setting is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigShowArguments:
    """The arguments of `drivetrain config show`."""

    defaults: bool = argument(
        True, "Show the settings that nobody has set, too.", brief="Leave out what nobody has set"
    )
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"finds_file": True})


def run(arguments: ConfigShowArguments) -> int:
    """Show every setting in force as YAML, each with its source; secrets are hidden."""
    file = arguments.layers.file
    sys.stdout.write(f"# file: {'none' if file is None else file}\n")
    kinds = sections()
    for section in in_order(kinds):
        resolved = resolve(kinds[section], section=section, layers=arguments.layers)
        lines = [f"{section}:"]
        for spec in specs(kinds[section], section):
            source, value = resolved.sources[spec.name], getattr(resolved.value, spec.name)
            if source.kind == "default" and not arguments.defaults:
                continue
            if spec.secret and value is not None:
                lines.append(f"  # {spec.name}: a secret, from {source}")
            else:
                text = f"  {spec.name}: {yaml_value(plain(value))}"
                lines.append(f"{text:<{_MOST_COLUMNS}}  # {source}")
        if len(lines) > 1:
            sys.stdout.write("\n".join([*lines, ""]))
    return 0
