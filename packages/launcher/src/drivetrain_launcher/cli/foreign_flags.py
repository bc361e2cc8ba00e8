"""Flags of other programs whose value decides their meaning; installed packages translate them."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, cast

from drivetrain_config.plugins.installed import entry_points
from drivetrain_launcher.cli.given_flags import GivenFlags
from drivetrain_launcher.errors import UsageError
from drivetrain_messages import say


class FlagMeanings(Protocol):
    """The meanings of several flags, which are named as the user wrote them."""

    @property
    def settings(self) -> Mapping[tuple[str, str], tuple[str, Any]]:
        """The flag and its value in drivetrain, by section and field."""
        ...

    @property
    def notices(self) -> Mapping[str, str]:
        """The notices on flags that drivetrain realises in another way."""
        ...

    @property
    def refused(self) -> Mapping[str, str]:
        """The reasons why flags cannot be honoured, each with a remedy."""
        ...


class ForeignFlags(Protocol):
    """A translation of another program's flags: an object or a module with these functions.

    A package registers its translation as an entry point of the group `drivetrain.foreign_flags`.
    """

    def takes(self, flag: str, known: Collection[str]) -> bool:
        """Return whether this translation takes a flag (the text before any `=`); `known` are drivetrain's flags."""
        ...

    def read(self, given: Mapping[str, str]) -> FlagMeanings:
        """Return the meanings of flags; `given` maps each flag to its value."""
        ...


def translator_of(flag: str, known: Collection[str]) -> ForeignFlags | None:
    """Return the translation that takes a flag; None if no translation does, as for a flag with one meaning."""
    loaded = (cast("ForeignFlags", point.load()) for point in entry_points("drivetrain.foreign_flags"))
    return next((each for each in loaded if each.takes(flag, known)), None)


def add_meanings(written: Mapping[ForeignFlags, Mapping[str, str]], given: GivenFlags) -> None:
    """Add the settings of foreign flags to `given`, and report flags that drivetrain realises differently.

    `written` maps each flag to its value. A UsageError lists all flags that are unsupported or contradict other
    flags.
    """
    refused: list[str] = []
    for translation, values in written.items():
        meanings = translation.read(values)
        refused += [f"{flag} {values[flag]}: {reason}" for flag, reason in meanings.refused.items()]
        for (section, field), (flag, value) in meanings.settings.items():
            shown = f"{flag} {values[flag]}"
            if (other := given.contradiction(section, field, value)) is not None:
                refused.append(f"{shown}: contradicts {other}; keep one of the two")
            else:
                given.put(section, field, value, written=shown)
        for flag, text in meanings.notices.items():
            say(f"{flag} {values[flag]}: {text}")
    if refused:
        raise UsageError("; ".join(refused))
