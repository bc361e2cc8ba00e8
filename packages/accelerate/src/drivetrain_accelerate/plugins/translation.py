"""The parts that translations of plugins to our settings share: errors, and what is not translated and why."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fate of each field of a class of options.

    Attributes:
        translated: The fields that become settings, with the settings' names; some of their values are refused.
        refused: The fields of which any value but the default is refused.
        without_effect: The fields that change nothing here, with the reason.
    """

    translated: Mapping[str, str]
    refused: frozenset[str]
    without_effect: Mapping[str, str]

    def all(self) -> set[str]:
        """Return the names of all fields."""
        return {*self.translated, *self.refused, *self.without_effect}


class TranslationError(ValueError):
    """A value of Accelerate's options that drivetrain cannot honour."""


def refusal(owner: str, field: str, value: object, ours: str, instead: str) -> TranslationError:
    """Return the error for a value that cannot be honoured.

    Args:
        owner: The class of the options.
        field: The name of the field.
        value: The value that was given.
        ours: The setting or part of drivetrain's that it would concern, such as "fsdp.prefetch".
        instead: The reason why not, and what to do.
    """
    return TranslationError(f"{owner}({field}={value!r}) (drivetrain: {ours}): {instead}")
