"""All rules, and the choice among them."""

from collections.abc import Sequence
from typing import Any

from drivetrain_lint.errors import LintArgumentError
from drivetrain_lint.rules import (
    devices,
    diverging_ranks,
    optimizer_steps,
    prepared_objects,
    schedules,
    shared_output,
)
from drivetrain_lint.rules.rule import Rule
from drivetrain_messages import suggest

ALL_RULES: tuple[Rule[Any], ...] = (
    *diverging_ranks.RULES,
    *prepared_objects.RULES,
    *optimizer_steps.RULES,
    *schedules.RULES,
    *devices.RULES,
    *shared_output.RULES,
)


def choose_rules(*, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> tuple[Rule[Any], ...]:
    """Return the rules to check: all, or those that `select` names, but not those that `ignore` names.

    A word is a code, the beginning of codes ("DT1"), a name, or "all"; LintArgumentError if it names no rule.
    """
    for word in (*select, *ignore):
        if word != "all" and not any(_is_named(rule, [word]) for rule in ALL_RULES):
            meant = suggest(word, [name for rule in ALL_RULES for name in (rule.code, rule.name)])
            raise LintArgumentError(
                f"{word}: no such rule{meant}; the rules are {', '.join(rule.code for rule in ALL_RULES)}; DT1 "
                "stands for all codes with this beginning"
            )
    return tuple(
        rule for rule in ALL_RULES if _is_named(rule, select or ["all"]) and not _is_named(rule, ignore)
    )


def _is_named(rule: Rule[Any], words: Sequence[str]) -> bool:
    return any(
        word == "all"
        or rule.name == word
        or (word.upper().startswith("DT") and rule.code.startswith(word.upper()))
        for word in words
    )
