"""The flags of one command line: values, and spellings as the user wrote them, by which errors name the flags."""

from dataclasses import dataclass, field
from typing import Any

from drivetrain_config import Flag
from drivetrain_launcher.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFlags:
    """The flags read so far, by section and field: the values, and the text that the user wrote.

    `repeated` are the names of the command's own fields whose flags may be given several times.
    """

    said: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    written: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    repeated: frozenset[str] = frozenset()

    @property
    def flags(self) -> dict[tuple[str, str], str]:
        """The flag as it was written, without its value, by section and field."""
        return {key: text.partition(" ")[0] for key, text in self.written.items()}

    def add(self, flag: Flag, value: str | bool, *, written: str, is_implied: bool = False) -> None:
        """Add a flag's value; `written` is the flag in the user's spelling, which may imply the value.

        If the flag already has another value, raise UsageError.
        """
        if not flag.section and flag.field in self.repeated:
            of_command = self.said.setdefault(flag.section, {})
            of_command[flag.field] = (*of_command.get(flag.field, ()), value)
            return
        shown = f"{written} {value}"
        if flag.is_switch:
            shown = written
        elif is_implied:
            shown = f"{written} ({flag.name} {value})"
        if (contradiction := self.contradiction(flag.section, flag.field, value)) is not None:
            raise UsageError(f"{shown}: contradicts {contradiction}; keep one of the two")
        self.put(flag.section, flag.field, value, written=shown)

    def put(self, section: str, name: str, value: Any, *, written: str) -> None:
        """Set the value of a field; the caller has checked that no flag gave another value."""
        self.said.setdefault(section, {})[name] = value
        self.written.setdefault((section, name), written)

    def contradiction(self, section: str, name: str, value: Any) -> str | None:
        """Return the text by which the user gave a field another value; None if the user gave no other."""
        fields = self.said.get(section, {})
        if name not in fields or str(fields[name]) == str(value):
            return None
        return self.written[section, name]
