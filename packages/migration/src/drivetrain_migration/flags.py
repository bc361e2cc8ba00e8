"""Accelerate's flags whose value decides their meaning, read together, since one may change another's meaning."""

from collections.abc import Collection, Mapping

from drivetrain_migration.option_families import DEEPSPEED, FP8, FSDP, LAUNCH
from drivetrain_migration.option_meanings import CombinedMeaning, read_words

FAMILIES = (FSDP, DEEPSPEED, FP8, LAUNCH)
_SHORT = {"-t": "tee", "-r": "redirects"}


def takes(flag: str, known: Collection[str]) -> bool:
    """Return whether a flag is one of these; drivetrain's meaning of a flag of the launch goes first."""
    word = _word_of(flag)
    if word in LAUNCH.words and flag.replace("_", "-") in known:
        return False
    return any(word in family.words for family in FAMILIES)


def read(given: Mapping[str, str]) -> CombinedMeaning:
    """Return the meaning of flags, given with their values, by flag as written."""
    found = CombinedMeaning()
    written = {_word_of(flag): flag for flag in given}
    for family in FAMILIES:
        words = {word: given[flag] for word, flag in written.items() if word in family.words}
        reading = read_words(family, words)
        for setting, (word, value) in reading.settings.items():
            found.settings[setting] = (written[word], value)
        found.notices.update({written[word]: text for word, text in reading.notices.items()})
        found.refused.update({written[word]: text for word, text in reading.refused.items()})
    return found


def _word_of(flag: str) -> str:
    """Return the key of a flag in Accelerate's files."""
    return _SHORT.get(flag) or flag.removeprefix("--").replace("-", "_")
