"""The settings that are handed to drivetrain's Accelerator, each with its source, which a run's plan shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from drivetrain_accelerate.environment_variables import is_same_word
from drivetrain_config import Source, environ
from drivetrain_config import sections as installed_sections
from drivetrain_config.source import Entry

PROGRAM = Source("code")
# What Accelerate does where a program says nothing, although drivetrain's own default is another. What the launch
# says comes before it.
UNSAID = Source("default", "Accelerate's default")
# Of the checkpoints in one folder of `save_state`, not of those folders; what the launch says overrules it.
ONE_IN_A_FOLDER = Source("default", "as in Accelerate, save_state replaces the checkpoint in its folder")
FSDP_PLUGIN = Source("code", "the FSDP plugin")
DEEPSPEED_PLUGIN = Source("code", "the DeepSpeed plugin")


@dataclass(frozen=True, slots=True)
class SourcedSettings:
    """Settings by section and field, with the source of each by "section.field"."""

    sections: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])
    sources: dict[str, Source] = field(default_factory=dict[str, Source])

    def add(
        self,
        section: str,
        given: Mapping[str, object],
        source: Source = PROGRAM,
        *,
        unsaid: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Add settings of a section, or replace them; what equals those of `unsaid` is Accelerate's default."""
        for name, value in given.items():
            is_unsaid = name in unsaid and unsaid[name] == value
            self.sections.setdefault(section, {})[name] = value
            self.sources[f"{section}.{name}"] = UNSAID if is_unsaid else source

    def entries(self) -> dict[str, dict[str, Entry]]:
        """Return the settings as drivetrain takes them, without those that repeat a default and that nobody said."""
        known = installed_sections(only=self.sections)
        found: dict[str, dict[str, Entry]] = {}
        for section, values in self.sections.items():
            defaults = {each.name: each.default for each in fields(known[section])}
            entries = {
                name: Entry(value, self.sources[f"{section}.{name}"])
                for name, value in values.items()
                if value is not None
            }
            found[section] = {
                name: entry
                for name, entry in entries.items()
                if entry.source != UNSAID or entry.value != defaults[name]
            }
        return found


def source_of(value: object, variable: str) -> Source:
    """Return the variable of Accelerate's that says a value, as its source; the program if the variable does not."""
    text = environ.read(variable)
    is_said = text is not None and is_same_word(text, str(value))
    return Source("environment", variable) if is_said else PROGRAM
