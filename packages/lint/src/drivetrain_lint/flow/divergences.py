"""The values of the flow model: the causes that part ranks, and the calls that some ranks then miss."""

import ast
from dataclasses import dataclass
from enum import StrEnum

from drivetrain_lint.flow.collectives import Collective


class Parting(StrEnum):
    """The kinds of causes that part ranks."""

    CONDITION = "condition"  # a test of the rank
    DECORATOR = "decorator"  # a function that runs on one rank
    LOOP = "loop"  # a loop whose length differs
    HANDLER = "handler"  # an exception that one rank may raise
    TURNS = "turns"  # a block that ranks run one after the other
    DATA = "data"  # a value that each rank computes from its own batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The statement or expression that parts ranks, and its source text.

    `departure` is the statement by which some ranks leave the block; None if they only take another branch.
    """

    kind: Parting
    node: ast.AST
    test: str
    departure: ast.stmt | None = None

    @property
    def line(self) -> int:
        """The line where ranks part."""
        return getattr(self.node, "lineno", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A collective that a call in the current function runs, directly or `through` functions, the outer first."""

    collective: Collective
    call: ast.Call
    through: tuple[str, ...] = ()

    @property
    def line(self) -> int:
        """The line of the call in the current function."""
        return self.call.lineno

    def described(self) -> str:
        """Return the collective and the functions that lead to it, for a message."""
        name = f"`{self.collective.shown}`"
        if not self.through:
            return name
        return f"`{self.through[0]}()`, which calls {name} (line {self.collective.node.lineno}),"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The collectives that some ranks miss for the same cause, in source order."""

    cause: Cause
    reached: tuple[Reached, ...]


_LONGEST_TEXT = 60


def text_of(node: ast.expr) -> str:
    """Return the source of an expression in one line, shortened."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
