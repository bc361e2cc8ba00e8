"""Plan the questions: from the settings' dataclasses, the facts of the machine and the answers so far.

A pure function. Which fields matter, and when, is metadata of the fields (`drivetrain_config.settings.advice`), so
that the section of a third party takes part by itself: a field without a default is always asked, one with a function
of its own when that function says so, and every other field only when the user goes through its section.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any

from drivetrain_config.settings.advice import Advice, advice_of
from drivetrain_config.settings.schema import FieldSpec, specs
from drivetrain_config.values.kinds import choices as closed_list
from drivetrain_config.values.kinds import is_optional, members

# The sections that are asked first, in this order; what they answer decides what others ask.
_FIRST = ("launch", "run")

Key = tuple[str, str]  # section and field


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """The answer to a question.

    Attributes:
        value: The value of the field.
        why: The reason for the value, which the file repeats.
    """

    value: Any
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An answer to choose from.

    Attributes:
        value: The value of the field.
        label: The text of the answer.
        about: The consequence of the answer, in a few words; empty if the label says all.
    """

    value: Any
    label: str
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question that the answers so far leave open.

    Attributes:
        section: The section of the field.
        field: The field that the answer sets.
        text: The text of the question.
        recommended: The recommended answer; MISSING if there is none.
        why: The reason for the recommendation.
        choices: The answers to choose from, the recommended one first; empty if the answer is typed.
        kind: The type of the field.
        after: The settings that are asked for first.
    """

    section: str
    field: str
    text: str
    recommended: Any
    why: str
    choices: tuple[Choice, ...]
    kind: Any
    after: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        """The section and the field."""
        return self.section, self.field


@dataclass(frozen=True, slots=True, kw_only=True)
class Questionnaire:
    """The questions that are left, given what has been answered.

    Attributes:
        questions: The open questions in their order; an answer may settle later ones, or raise others. A question
            that waits for the answer to another one is left out.
        further: The sections with settings that are not asked, which the user may go through, with a summary of each.
    """

    questions: tuple[Question, ...]
    further: Mapping[str, str]


def plan_questions(
    sections: Mapping[str, type[Any]],
    facts: Mapping[str, Any],
    answers: Mapping[Key, GivenAnswer],
    *,
    earlier: Mapping[Key, GivenAnswer] | None = None,
    opened: Collection[str] = (),
) -> Questionnaire:
    """Return the questions that are left.

    Args:
        sections: The dataclasses of the sections, by name.
        facts: The facts of the machine, as `MachineFacts.known` returns them.
        answers: The answers so far.
        earlier: The settings of an earlier file, which become recommendations.
        opened: The sections that the user goes through in full.
    """
    before = earlier or {}
    known = known_so_far(sections, facts, answers, before)
    names = [name for name in in_order(sections) if _is_relevant(name, known)]
    found = [
        question
        for name in names
        for question in _questions_of(sections[name], name, known, answers, before, name in opened)
    ]
    further = {
        name: (sections[name].__doc__ or "").partition("\n")[0]
        for name in names
        if name not in opened and any(_is_further(spec, answers) for spec in specs(sections[name], name))
    }
    waited_for = {f"{question.section}.{question.field}" for question in found}
    ready = [question for question in found if waited_for.isdisjoint(question.after)]
    return Questionnaire(questions=tuple(ready), further=further)


def known_so_far(
    sections: Mapping[str, type[Any]],
    facts: Mapping[str, Any],
    answers: Mapping[Key, GivenAnswer],
    earlier: Mapping[Key, GivenAnswer],
) -> dict[str, Any]:
    """Return what the fields' functions are told: the facts, and the value of every setting so far."""
    known = dict(facts)
    for name, kind in sections.items():
        known |= {
            f"{name}.{spec.name}": spec.default for spec in specs(kind, name) if spec.default is not MISSING
        }
    for (section, field), answer in {**earlier, **answers}.items():
        known[f"{section}.{field}"] = answer.value
    return {**known, "plan.num_processes": _num_processes(known)}


def in_order(sections: Iterable[str]) -> list[str]:
    """Return the names of sections in the order of questions and of the file: launch and run first."""
    return sorted(sections, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))


def _is_relevant(section: str, known: Mapping[str, Any]) -> bool:
    """Return whether a section applies: that of a backend does if the backend is the chosen one."""
    return section not in known.get("installed.backends", {}) or known.get("run.backend") == section


def _questions_of(
    kind: type[Any],
    section: str,
    known: Mapping[str, Any],
    answers: Mapping[Key, GivenAnswer],
    earlier: Mapping[Key, GivenAnswer],
    is_opened: bool,
) -> Iterator[Question]:
    for spec in specs(kind, section):
        if (section, spec.name) in answers or spec.secret:
            continue
        advice = advice_of(spec.ask, known)
        if advice is None and not is_opened and spec.default is not MISSING:
            continue
        yield _question(spec, advice or {}, earlier.get((section, spec.name)))


def _question(spec: FieldSpec, advice: Mapping[str, Any] | Advice, before: GivenAnswer | None) -> Question:
    recommended = advice.get("value", spec.default)
    why = advice.get("why", "the default" if spec.default is not MISSING else "")
    if before is not None:
        recommended, why = before.value, before.why
    if isinstance(recommended, Enum):
        recommended = recommended.value
    return Question(
        section=spec.section,
        field=spec.name,
        text=advice.get("text") or f"{spec.help[:1].upper()}{spec.help[1:].rstrip('.')}?",
        recommended=recommended,
        why=why,
        choices=_choices(spec, advice.get("choices"), recommended),
        kind=spec.kind,
        after=tuple(advice.get("after", ())),
    )


def _choices(spec: FieldSpec, given: Mapping[Any, str] | None, recommended: Any) -> tuple[Choice, ...]:
    """Return the answers to choose from, the recommended one first."""
    if given is not None:
        found = [Choice(value=value, label=_label(value), about=about) for value, about in given.items()]
    elif members(spec.kind) == (bool,):
        found = [Choice(value=True, label="yes"), Choice(value=False, label="no")]
    elif (known := closed_list(spec.kind)) is not None:
        found = [Choice(value=value, label=_label(value)) for value in known]
    else:
        return ()
    if is_optional(spec.kind) and not any(choice.value is None for choice in found) and given is None:
        found.append(Choice(value=None, label="not set"))
    if recommended is not MISSING and not any(choice.value == recommended for choice in found):
        found.insert(0, Choice(value=recommended, label=_label(recommended)))
    return tuple(sorted(found, key=lambda choice: choice.value != recommended))


def _label(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, (tuple, list)) else str(value)


def _is_further(spec: FieldSpec, answers: Mapping[Key, GivenAnswer]) -> bool:
    return not spec.secret and (spec.section, spec.name) not in answers


def _num_processes(known: Mapping[str, Any]) -> int:
    """Return the number of processes on all nodes that the answers so far amount to."""
    nodes = known.get("cluster.num_nodes") or known.get("launch.num_nodes") or 1
    if (total := known.get("launch.num_processes")) is not None:
        return total
    per_node = known.get("launch.processes_per_node") or max(1, known.get("machine.accelerator_count", 0))
    return nodes * per_node
