"""Accelerate's flags whose value decides their meaning, interpreted together, since one may change another's."""

from collections.abc import Collection, Mapping

from drivetrain_config.accelerate_deepspeed import DEEPSPEED
from drivetrain_config.accelerate_fp8 import FP8
from drivetrain_config.accelerate_fsdp import FSDP
from drivetrain_config.accelerate_launch import LAUNCH
from drivetrain_config.accelerate_words import read_words
from drivetrain_launcher.cli.given_flags import GivenFlags
from drivetrain_launcher.errors import UsageError
from drivetrain_messages import say

FAMILIES = (FSDP, DEEPSPEED, FP8, LAUNCH)
_SHORT = {"-t": "tee", "-r": "redirects"}


def word_of(flag: str, known: Collection[str] = ()) -> str | None:
    """Return the key of a flag in Accelerate's files; None if the flag's value does not decide its meaning.

    Args:
        flag: The flag as written, up to an `=`.
        known: The names of our flags; a flag of the launch that is ours too has our meaning.
    """
    word = _SHORT.get(flag) or flag.removeprefix("--").replace("-", "_")
    if word in LAUNCH.words and flag.replace("_", "-") in known:
        return None
    return word if any(word in family.words for family in FAMILIES) else None


def add_meanings(written: Mapping[str, tuple[str, str]], given: GivenFlags) -> None:
    """Add the settings that these flags mean to `given`, and report those that are realised differently.

    Args:
        written: The flag as written and its value, by Accelerate's key.
        given: The other flags with their values; updated in place.

    Raises:
        UsageError: If flags are unsupported or contradict others; the message lists all of them.
    """
    refused: list[str] = []
    for family in FAMILIES:
        reading = read_words(
            family, {word: value for word, (_, value) in written.items() if word in family.words}
        )
        refused += [f"{' '.join(written[word])}: {reason}" for word, reason in reading.refused.items()]
        for (section, field), (word, value) in reading.settings.items():
            shown = " ".join(written[word])
            if (other := given.contradiction(section, field, value)) is not None:
                refused.append(f"{shown}: contradicts {other}; keep one of the two")
            else:
                given.put(section, field, value, written=shown)
        for word, text in reading.notices.items():
            say(f"{' '.join(written[word])}: {text}")
    if refused:
        raise UsageError("; ".join(refused))
