"""The form of a rule."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.rules.visitor import Visitor

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[Part]):
    """A fault that the linter finds: `visits` returns parts of a script, and `check` finds the fault in one of them.

    `summary`, `why` and `mend` are the fault, its consequence and its removal, in sentences without a script's names.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    why: str
    mend: str
    visits: Callable[[Visitor], Iterable[Part]]
    check: Callable[[Part], Iterable[Hit]]

    def find(self, visitor: Visitor) -> Iterator[Hit]:
        """Iterate over the places of a script that break the rule."""
        for part in self.visits(visitor):
            yield from self.check(part)


def rule(
    *,
    code: str,
    name: str,
    severity: Severity,
    why: str,
    mend: str,
    visits: Callable[[Visitor], Iterable[Part]],
) -> Callable[[Callable[[Part], Iterable[Hit]]], Rule[Part]]:
    """Make a rule of a check, with the check's docstring as its summary."""

    def decorate(check: Callable[[Part], Iterable[Hit]]) -> Rule[Part]:
        return Rule(
            code=code,
            name=name,
            severity=severity,
            summary=check.__doc__ or name.replace("-", " "),  # python -OO drops docstrings
            why=why,
            mend=mend,
            visits=visits,
            check=check,
        )

    return decorate
