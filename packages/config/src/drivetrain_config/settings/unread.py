"""Settings that were given in any layer and have no effect on this run.

The metadata of a field says what the field needs, `{"needs": CONDITION}`. A condition consists of these words, joined
by " or ", which binds more tightly, and " and ":

- `NAME`, `NAME=VALUE` or `NAME!=VALUE`: another setting of the section, by its text; `NAME` alone must be set.
- `run.NAME`, with or without a value: a setting in force of the run; `run.log_with` stands for any tracker.
- One of `EVENTS`: an event of the run, known at the run's end.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from drivetrain_config.settings.resolution import Resolved

EVENTS = (
    "a prepared loader",
    "a checkpoint",
    "a checkpoint at a URL",
    "a save",
    "a call of save_if_due()",
)
_SETTING = re.compile(r"([\w.]+)(?:(!?)=(.+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """Settings of a section that have no effect for the same reason; `said` shows their values and sources."""

    section: str
    said: Mapping[str, str]
    why: str

    @property
    def names(self) -> list[str]:
        """The settings, as "section.field"."""
        return [f"{self.section}.{field}" for field in self.said]

    def __str__(self) -> str:
        return f"{self.section}: {', '.join(self.said.values())} has no effect, {self.why}"


def find_unread(
    resolved: Mapping[str, Resolved[Any]],
    others: Mapping[str, Resolved[Any]],
    *,
    backends: Collection[str],
    backend: str,
    run: Mapping[str, object],
) -> list[Unread]:
    """Return the given settings without effect that are known at the beginning of a run.

    `others` are the sections that the run does not read; `backend` is the class of the backend that trains, `run` has
    the settings of the run in force, by "run.NAME".
    """
    found: list[Unread] = []
    for section, other in others.items():
        why = "since it is no part of this program; the command that has it reads flags, environment and file"
        if section in backends:
            why = f"since this run uses {backend}; backend={section!r} or --backend {section} uses it"
        found.append(Unread(section=section, said=_show_given(other, None), why=why))
    return [one for one in (*found, *_find_unmet(resolved, run, at_end=False)) if one.said]


def find_unused(resolved: Mapping[str, Resolved[Any]], events: Collection[str]) -> list[Unread]:
    """Return the given settings without effect, because `events` has no event that they need."""
    return [one for one in _find_unmet(resolved, dict.fromkeys(events, True), at_end=True) if one.said]


def _find_unmet(
    resolved: Mapping[str, Resolved[Any]], facts: Mapping[str, object], *, at_end: bool
) -> list[Unread]:
    """Return the settings whose condition does not hold; `at_end` chooses the conditions on events."""
    found: dict[tuple[str, str], list[str]] = {}
    for section, one in resolved.items():
        for field in fields(one.value):
            for condition in filter(None, field.metadata.get("needs", "").split(" and ")):
                words = condition.split(" or ")
                is_due = at_end == any(word in EVENTS for word in words)
                if is_due and not any(_holds(word, one.value, facts) for word in words):
                    found.setdefault((section, condition), []).append(field.name)
    unread: list[Unread] = []
    for (section, condition), names in found.items():
        needed = [
            word if word in EVENTS or word.startswith("run.") else f"{section}.{word}"
            for word in condition.split(" or ")
        ]
        why = f"since it needs {' or '.join(needed)}"
        unread.append(Unread(section=section, said=_show_given(resolved[section], names), why=why))
    return unread


def _holds(word: str, section: Any, facts: Mapping[str, object]) -> bool:
    if word in EVENTS:
        return word in facts
    found = _SETTING.fullmatch(word)
    assert found is not None, word  # a test reads every condition
    name, differs, value = found.groups()
    actual = facts[name] if name.startswith("run.") else getattr(section, name)
    if value is None:
        return actual not in (None, False)
    return (str(actual) == value) != bool(differs)


def _show_given(section: Resolved[Any], names: Collection[str] | None) -> dict[str, str]:
    """Return the values and sources of the given fields; `names` limits the fields unless it is None.

    A default in code counts as not given, because a section passed as its dataclass holds all fields.
    """
    found: dict[str, str] = {}
    for each in fields(section.value):
        source, value = section.sources[each.name], getattr(section.value, each.name)
        is_default = source.kind == "default" or (source.kind == "code" and value == each.default)
        if not is_default and (names is None or each.name in names):
            shown = "***" if each.metadata.get("secret") else repr(value)
            found[each.name] = f"{each.name}={shown} ({source})"
    return found
