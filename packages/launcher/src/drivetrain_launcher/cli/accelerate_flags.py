"""Accelerate's flags for FSDP and DeepSpeed, interpreted together, since one may change the meaning of another."""

from collections.abc import Mapping
from typing import Any

from drivetrain_config.accelerate_deepspeed import DEEPSPEED
from drivetrain_config.accelerate_fsdp import FSDP
from drivetrain_config.accelerate_words import read_words
from drivetrain_config.schema import flag_name
from drivetrain_launcher.console import say
from drivetrain_launcher.errors import UsageError

_FAMILIES = (FSDP, DEEPSPEED)

# The values that flags set, by section and field.
Said = dict[str, dict[str, Any]]


def word_of(flag: str) -> str | None:
    """Return the key of a flag in Accelerate's files; None if the flag is not one for FSDP or DeepSpeed."""
    word = flag.removeprefix("--").replace("-", "_")
    return word if any(word in family.words for family in _FAMILIES) else None


def add_meanings(written: Mapping[str, tuple[str, str]], said: Said) -> None:
    """Add the settings that these flags mean to `said`, and log those that are realised differently.

    Args:
        written: The flag as written and its value, by Accelerate's key.
        said: The values that other flags set, by section and field; updated in place.

    Raises:
        UsageError: If flags are unsupported or contradict others; the message lists all of them.
    """
    refused: list[str] = []
    for family in _FAMILIES:
        reading = read_words(
            family, {word: value for word, (_, value) in written.items() if word in family.words}
        )
        refused += [f"{' '.join(written[word])}: {reason}" for word, reason in reading.refused.items()]
        for (section, field), (word, value) in reading.settings.items():
            other = said.setdefault(section, {}).setdefault(field, value)
            if str(other) != str(value):
                flag = flag_name(section, field)
                refused.append(f"{' '.join(written[word])}: contradicts {flag} {other}; keep one of the two")
        for word, text in reading.notices.items():
            say(f"{' '.join(written[word])}: {text}")
    if refused:
        raise UsageError("; ".join(refused))
