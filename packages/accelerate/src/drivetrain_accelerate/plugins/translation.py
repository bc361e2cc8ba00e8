"""The translation of each field of Accelerate's options: a setting of drivetrain's, an error, or nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


class TranslationError(ValueError):
    """A value of Accelerate's options that drivetrain cannot honour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The translation of each field of a class of options.

    Attributes:
        owner: The name of the class.
        translated: The settings that fields become; some of their values are refused.
        refused: The part of drivetrain that other values than the default would concern, and what to do instead.
        without_effect: The reasons of fields that change nothing here.
    """

    owner: str
    translated: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    without_effect: Mapping[str, str] = field(default_factory=dict[str, str])

    def all(self) -> set[str]:
        """Return the names of all fields."""
        return {*self.translated, *self.refused, *self.without_effect}

    def settings(self, options: Any) -> dict[str, Any]:
        """Return the fields of a section that take values as they are: those translated to `section.field` alone."""
        found = ((ours.partition(".")[2], name) for name, ours in self.translated.items())
        return {field: getattr(options, name) for field, name in found if field.isidentifier()}

    def refusal(self, name: str, value: object, instead: str = "", *, ours: str = "") -> TranslationError:
        """Return the error for a value that cannot be honoured, by default with the table's words."""
        of_table, way_out = self.refused.get(name, (self.translated.get(name, ""), ""))
        return TranslationError(
            f"{self.owner}({name}={value!r}) (drivetrain: {ours or of_table}): {instead or way_out}"
        )

    def check(self, options: Any) -> None:
        """Refuse options of which a refused field is neither its default nor False, as which a plugin fills None."""
        for each in fields(options):
            if each.name not in self.refused:
                continue
            value = getattr(options, each.name)
            if value != each.default and not (each.default is None and value is False):
                raise self.refusal(each.name, value)
