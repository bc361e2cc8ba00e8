"""A reader of layered settings: sections, precedence, sources, schema.

A section is a frozen dataclass. `resolve` fills it from code, command line, environment, file and default, in this
order of precedence, and records the source of each field. Flags, JSON schema, tables and questions are generated from
the same dataclass. Only `drivetrain_config.environ` reads or writes the process's environment.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_config.environ import RankEnvironment as RankEnvironment
    from drivetrain_config.errors import ConfigError as ConfigError
    from drivetrain_config.plugins.registry import commands as commands
    from drivetrain_config.plugins.registry import section_names as section_names
    from drivetrain_config.plugins.registry import sections as sections
    from drivetrain_config.settings.layers import Layers as Layers
    from drivetrain_config.settings.resolution import Resolved as Resolved
    from drivetrain_config.settings.resolution import SettingConflict as SettingConflict
    from drivetrain_config.settings.resolution import resolve as resolve
    from drivetrain_config.settings.schema import Flag as Flag
    from drivetrain_config.settings.schema import Prompt as Prompt
    from drivetrain_config.settings.schema import flags as flags
    from drivetrain_config.settings.schema import json_schema as json_schema
    from drivetrain_config.settings.schema import markdown_table as markdown_table
    from drivetrain_config.settings.schema import questions as questions
    from drivetrain_config.source import Source as Source

# Module -> its public names.
_NAMES = {
    "environ": "RankEnvironment",
    "errors": "ConfigError",
    "plugins.registry": "commands section_names sections",
    "settings.layers": "Layers",
    "settings.resolution": "resolve Resolved SettingConflict",
    "settings.schema": "Flag flags json_schema markdown_table Prompt questions",
    "source": "Source",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
