"""Accelerate's flags for FSDP and DeepSpeed, read together, since one may change what another means."""

from collections.abc import Mapping
from typing import Any

from drivetrain_config.accelerate_deepspeed import DEEPSPEED
from drivetrain_config.accelerate_fsdp import FSDP
from drivetrain_config.accelerate_words import read_words
from drivetrain_config.schema import flag_name
from drivetrain_launcher.console import say
from drivetrain_launcher.errors import UsageError

_FAMILIES = (FSDP, DEEPSPEED)

# What flags say, by section and field.
Said = dict[str, dict[str, Any]]


def word_of(flag: str) -> str | None:
    """The word that a flag stands for, as Accelerate's files spell it; None if it is none for FSDP or DeepSpeed."""
    word = flag.removeprefix("--").replace("-", "_")
    return word if any(word in family.words for family in _FAMILIES) else None


def add_meanings(written: Mapping[str, tuple[str, str]], said: Said) -> None:
    """Add what these flags mean to what others say, and tell what is met in another way.

    Args:
        written: The flag as written and its value, by word.
        said: What other flags say, by section and field.

    Raises:
        UsageError: One cannot be honoured, or contradicts another; the message lists all of them.
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
        for word, text in reading.told.items():
            say(f"{' '.join(written[word])}: {text}")
    if refused:
        raise UsageError("; ".join(refused))
