"""The meanings of Accelerate's options for a sharding backend: a setting, a notice or a refusal.

An option that drivetrain meets in another way, with the same training, gives a notice. An option that would change
the training, or that drivetrain cannot honour, is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

UNSAID = ("", "none", "null", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The meaning of one option and its value; empty if drivetrain behaves as requested anyway.

    A meaning sets a field of a section, or notes how drivetrain does the same otherwise, or tells why it cannot.
    """

    setting: tuple[str, str] | None = None
    value: Any = None
    notice: str = ""
    refused: str = ""


Reader = Callable[[Any], Meaning]
Together = Callable[[Mapping[str, Any]], Mapping[str, Meaning]]

NO_CHANGE = Meaning()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The options of one Accelerate backend: a reader for each option, and one for options that depend on others."""

    words: Mapping[str, Reader]
    together: Together = lambda _given: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedMeaning:
    """The combined meaning of several options: settings with option and value; notices and refusals by option."""

    settings: dict[tuple[str, str], tuple[str, Any]] = field(
        default_factory=dict[tuple[str, str], tuple[str, Any]]
    )
    notices: dict[str, str] = field(default_factory=dict[str, str])
    refused: dict[str, str] = field(default_factory=dict[str, str])


def read_words(family: Family, given: Mapping[str, Any]) -> CombinedMeaning:
    """Read the options of a family. A value is a text, or an object that a file's parser returned."""
    meanings = {word: family.words[word](value) for word, value in given.items() if value is not None}
    reading = CombinedMeaning()
    for word, meaning in {**meanings, **family.together(given)}.items():
        first, value = reading.settings.get(meaning.setting or ("", ""), (word, meaning.value))
        if meaning.refused:
            reading.refused[word] = meaning.refused
        elif value != meaning.value:
            reading.refused[word] = f"contradicts {first}={given[first]}; keep one of the two"
        elif meaning.setting is not None:
            reading.settings.setdefault(meaning.setting, (word, value))
        if meaning.notice:
            reading.notices[word] = meaning.notice
    return reading


def spelled(value: Any) -> str:
    """Return the lowercase text of a value, be it text, number or bool."""
    return str(value).lower()


def is_set(value: Any) -> bool:
    """Return whether a value requests something, i.e. is not null or "auto" in any spelling."""
    return value is not None and spelled(value) not in UNSAID


def set_field(section: str, field: str, value: Any) -> Meaning:
    """Return a meaning that sets a field."""
    return Meaning(setting=(section, field), value=value)


def notice(text: str) -> Meaning:
    """Return a meaning that gives a notice."""
    return Meaning(notice=text)


def refused(text: str) -> Meaning:
    """Return a meaning that refuses the option."""
    return Meaning(refused=text)


def one_of(meanings: Mapping[str, Meaning], otherwise: Meaning | None = None) -> Reader:
    """Return the reader of an option with a fixed list of values; other values mean `otherwise`, or are refused.

    Each key of `meanings` lists the spellings of one value, separated by spaces. Upper and lower case are the same.
    """
    known = {one.lower(): meaning for spellings, meaning in meanings.items() for one in spellings.split()}
    unknown = otherwise or refused(f"say one of {', '.join(each.split()[0] for each in meanings)}")
    return lambda value: known.get(spelled(value), unknown)


def choice(section: str, field: str, meanings: Mapping[str, Any]) -> Reader:
    """Return a reader as `one_of` does; an entry of `meanings` may also be the value to set the field to."""
    return one_of(
        {
            spellings: value if isinstance(value, Meaning) else set_field(section, field, value)
            for spellings, value in meanings.items()
        }
    )


def switch(*, on: Meaning, off: Meaning = NO_CHANGE) -> Reader:
    """Return the reader of a boolean option."""
    return one_of({"true": on, "false": off})


def only(usual: str, reason: str) -> Reader:
    """Return the reader of an option with a single value in drivetrain; refuse all other values."""
    return one_of({usual: NO_CHANGE}, otherwise=refused(reason))


def pass_through(section: str, field: str) -> Reader:
    """Return the reader of an option whose value is passed to a field unchanged."""
    return lambda value: set_field(section, field, value) if is_set(value) else NO_CHANGE


def unless_off(reason: str) -> Reader:
    """Return the reader of an option that is refused unless it requests nothing."""
    return lambda value: refused(reason) if is_set(value) else NO_CHANGE
