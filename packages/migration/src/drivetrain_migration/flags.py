"""Read Accelerate's flags together, since the value of one flag may change the meaning of another."""

from collections.abc import Collection, Mapping

from drivetrain_migration.option_families import DEEPSPEED, FP8, FSDP, LAUNCH, MEGATRON
from drivetrain_migration.option_meanings import CombinedMeaning, read_words

FAMILIES = (FSDP, DEEPSPEED, MEGATRON, FP8, LAUNCH)
_SHORT = {"-t": "tee", "-r": "redirects"}


def takes(flag: str, known: Collection[str]) -> bool:
    """Return whether a flag is read here; a launch flag that drivetrain knows too (`known`) is not."""
    word = _word_of(flag)
    if word in LAUNCH.words and flag.replace("_", "-") in known:
        return False
    return any(word in family.words for family in FAMILIES)


def read(given: Mapping[str, str]) -> CombinedMeaning:
    """Return the meanings of flags by the spelling on the command line; `given` has the value of each flag."""
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
    """Return the key that Accelerate's configuration files have for a flag."""
    return _SHORT.get(flag) or flag.removeprefix("--").replace("-", "_")
