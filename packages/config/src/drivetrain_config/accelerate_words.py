"""What Accelerate's words for a sharding backend come to: our settings, a thing to tell, or a refusal.

A word whose wish is met in another way, so that the training is the same, is told about; one that would change what
is trained, or that nothing here can do, is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_UNSAID = ("", "none", "null", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What one word with its value means here; nothing at all where what it asks for is so anyway.

    Attributes:
        setting: The section and field that it sets.
        value: What it sets the field to.
        told: How its wish is met otherwise, and what a script does for it.
        refused: Why it cannot be honoured, and the way out.
    """

    setting: tuple[str, str] | None = None
    value: Any = None
    told: str = ""
    refused: str = ""


Reader = Callable[[Any], Meaning]
Together = Callable[[Mapping[str, Any]], Mapping[str, Meaning]]

SO_ANYWAY = Meaning()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The words for one backend.

    Attributes:
        backend: The backend's name here.
        words: How each word's value is read.
        together: What words mean that another one changes; it stands in front of what they mean alone.
    """

    backend: str
    words: Mapping[str, Reader]
    together: Together


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What several words come to.

    Attributes:
        settings: The word and the value, by section and field.
        told: What to tell of a word.
        refused: Why a word cannot be honoured.
    """

    settings: dict[tuple[str, str], tuple[str, Any]] = field(
        default_factory=dict[tuple[str, str], tuple[str, Any]]
    )
    told: dict[str, str] = field(default_factory=dict[str, str])
    refused: dict[str, str] = field(default_factory=dict[str, str])


def read_words(family: Family, given: Mapping[str, Any]) -> Reading:
    """Read words of a family, each with its value, as text or as a file's parser gives it."""
    meanings = {word: family.words[word](value) for word, value in given.items() if value is not None}
    reading = Reading()
    for word, meaning in {**meanings, **family.together(given)}.items():
        first, value = reading.settings.get(meaning.setting or ("", ""), (word, meaning.value))
        if meaning.refused:
            reading.refused[word] = meaning.refused
        elif value != meaning.value:
            reading.refused[word] = f"contradicts {first}={given[first]}; keep one of the two"
        elif meaning.setting is not None:
            reading.settings.setdefault(meaning.setting, (word, value))
        if meaning.told:
            reading.told[word] = meaning.told
    return reading


def spelled(value: Any) -> str:
    """A value as it is spelled, without case: text, number and bool alike."""
    return str(value).lower()


def is_said(value: Any) -> bool:
    """Whether a value asks for something: it is no null, however that is spelled."""
    return value is not None and spelled(value) not in _UNSAID


def means(section: str, field: str, value: Any) -> Meaning:
    """A field and what it is set to."""
    return Meaning(setting=(section, field), value=value)


def told(text: str) -> Meaning:
    """A wish that is met in another way."""
    return Meaning(told=text)


def refused(text: str) -> Meaning:
    """A wish that cannot be honoured."""
    return Meaning(refused=text)


def one_of(meanings: Mapping[str, Meaning], otherwise: Meaning | None = None) -> Reader:
    """A word with a closed list of values.

    Args:
        meanings: By what may be said; the spellings of one value stand between spaces, case does not count.
        otherwise: What any other value means; None refuses it with the list.
    """
    known = MappingProxyType(
        {one.lower(): meaning for spellings, meaning in meanings.items() for one in spellings.split()}
    )
    unknown = otherwise or refused(f"say one of {', '.join(each.split()[0] for each in meanings)}")
    return lambda value: known.get(spelled(value), unknown)


def switch(*, on: Meaning, off: Meaning = SO_ANYWAY) -> Reader:
    """A word that is true or false."""
    return one_of({"true": on, "false": off})


def passed(section: str, field: str) -> Reader:
    """A word whose value is the field's, as it stands."""
    return lambda value: means(section, field, value) if is_said(value) else SO_ANYWAY


def unless_off(reason: str) -> Reader:
    """A word that is refused when it says anything."""
    return lambda value: refused(reason) if is_said(value) else SO_ANYWAY
