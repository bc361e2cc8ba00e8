"""Plan the questions: from the settings' dataclasses, the facts of the machine and the answers so far.

Pure. Metadata of the fields (`drivetrain_config.settings.advice`) decides which fields matter, and when, so that a
third party's section takes part without a change here. A field without a default is always asked, a field with an
`ask` function when the function says so, and every other field only when the user goes through its section.
"""

from collections.abc import Collection, Iterable, Mapping
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
    """The value of a field, and the reason for it, which the file repeats."""

    value: Any
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An answer to choose from: the value of the field, the text of the answer, and its consequence, if any."""

    value: Any
    label: str
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question that the answers so far leave open.

    `recommended` is MISSING if no answer is recommended. `choices` begins with the recommended answer, and is empty
    if the user types the answer. The settings of `after` are asked for first.
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
    """The open questions whose `after` is answered.

    An answer may settle later questions, or raise others. `further` has a summary of each section with settings that
    are not asked.
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

    Settings of an `earlier` file become recommendations; the user goes through the `opened` sections in full.
    """
    before = earlier or {}
    # What the fields' functions take: the facts, and the value of every setting so far.
    known = dict(facts)
    for name, kind in sections.items():
        known |= {
            f"{name}.{spec.name}": spec.default for spec in specs(kind, name) if spec.default is not MISSING
        }
    known |= {
        f"{section}.{field}": answer.value for (section, field), answer in {**before, **answers}.items()
    }
    nodes = known.get("cluster.num_nodes") or known.get("launch.num_nodes") or 1
    per_node = known.get("launch.processes_per_node") or max(1, known.get("machine.accelerator_count", 0))
    total = known.get("launch.num_processes")
    known["plan.num_processes"] = nodes * per_node if total is None else total
    backends = known.get("installed.backends", {})
    found: list[Question] = []
    further: dict[str, str] = {}
    for name in in_order(sections):
        if name in backends and known.get("run.backend") != name:
            continue  # the section of a backend that is not chosen
        unanswered = [
            spec
            for spec in specs(sections[name], name)
            if not spec.secret and (name, spec.name) not in answers
        ]
        for spec in unanswered:
            advice = advice_of(spec.ask, known)
            if advice is not None or name in opened or spec.default is MISSING:
                found.append(_question(spec, advice or {}, before.get((name, spec.name))))
        if unanswered and name not in opened:
            further[name] = (sections[name].__doc__ or "").partition("\n")[0]
    waited_for = {f"{question.section}.{question.field}" for question in found}
    ready = [question for question in found if waited_for.isdisjoint(question.after)]
    return Questionnaire(questions=tuple(ready), further=further)


def in_order(sections: Iterable[str]) -> list[str]:
    """Return the names of sections in the order of questions and of the file: launch and run first."""
    return sorted(sections, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))


def _question(spec: FieldSpec, advice: Mapping[str, Any] | Advice, before: GivenAnswer | None) -> Question:
    recommended = advice.get("value", spec.default)
    why = advice.get("why", "the default" if spec.default is not MISSING else "")
    if before is not None:
        recommended, why = before.value, before.why
    if isinstance(recommended, Enum):
        recommended = recommended.value
    listed = advice.get("choices")
    if listed is None:
        known = (True, False) if members(spec.kind) == (bool,) else closed_list(spec.kind)
        if known is not None:
            listed = dict.fromkeys((*known, None) if is_optional(spec.kind) else known, "")
    if listed is not None and recommended is not MISSING and recommended not in listed:
        listed = {recommended: "", **listed}
    labels: dict[Any, str] = {None: "not set", True: "yes", False: "no"}
    choices: list[Choice] = []
    for value, about in (listed or {}).items():
        label = ", ".join(map(str, value)) or "none" if isinstance(value, (tuple, list)) else str(value)
        if value is None or isinstance(value, bool):
            label = labels[value]
        choices.append(Choice(value=value, label=label, about=about))
    return Question(
        section=spec.section,
        field=spec.name,
        text=advice.get("text") or f"{spec.help[:1].upper()}{spec.help[1:].rstrip('.')}?",
        recommended=recommended,
        why=why,
        choices=tuple(sorted(choices, key=lambda choice: choice.value != recommended)),
        kind=spec.kind,
        after=tuple(advice.get("after", ())),
    )
