"""The form of a rule."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A fault that the linter finds.

    Attributes:
        code: The stable code, such as "DT101".
        name: The name in words, such as "collective-on-some-ranks".
        severity: The weight of the fault.
        summary: The fault, in a sentence without the names of a script.
        why: The consequence of the fault.
        mend: The change that removes the fault.
        check: The function that finds it in a script.
        is_default: Whether the rule is on unless others are selected.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    why: str
    mend: str
    check: Callable[[Program], Iterator[Hit]]
    is_default: bool = True
