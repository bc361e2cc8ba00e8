"""The form of a rule."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.rules.visitor import Visitor

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Rule(Generic[Part]):
    """A fault that the linter finds: `visits` returns parts of a script, and `check` finds the fault in a part.

    `summary`, `why` and `repair` are sentences about the fault, its consequence and its removal, without names of a
    script. By default, the summary is the docstring of `check`. `partial(Rule, ...)` decorates a check.
    """

    check: Callable[[Part], Iterable[Hit]]
    _: KW_ONLY
    code: str
    name: str
    severity: Severity
    summary: str = ""
    why: str
    repair: str
    visits: Callable[[Visitor], Iterable[Part]]

    def __post_init__(self) -> None:
        if not self.summary:  # python -OO drops docstrings
            object.__setattr__(self, "summary", self.check.__doc__ or self.name.replace("-", " "))

    def find(self, visitor: Visitor) -> Iterator[Hit]:
        """Iterate over the places of a script that break the rule."""
        for part in self.visits(visitor):
            yield from self.check(part)
