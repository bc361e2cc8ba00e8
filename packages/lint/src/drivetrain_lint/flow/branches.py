"""The branches of tests of the rank, and pairs of tests that keep ranks together."""

import ast
from collections.abc import Iterator, Sequence

from drivetrain_lint.flow.exits import always_leaves, may_leave
from drivetrain_lint.flow.rank_tests import RankSubset, RankTests
from drivetrain_lint.flow.signatures import Signatures


def branches_agree(
    statement: ast.If, rest: Sequence[ast.stmt], signatures: Signatures, *, in_loop: bool
) -> bool:
    """Return whether both sides of a test run the same collectives, up to the end of the function or loop body.

    A branch that always returns (in a loop: continues) is compared with the other branch plus the rest. With any
    other departure, the branches differ; the walk then decides whether the departure skips a collective.
    """
    then, other = list(statement.body), list(statement.orelse)
    first, second = always_leaves(then), always_leaves(other)
    ends = ast.Continue if in_loop else ast.Return
    if isinstance(first, ends) and second is None and not may_leave(other):
        other += rest
    elif isinstance(second, ends) and first is None and not may_leave(then):
        then += rest
    elif type(first) is not type(second) or (first is None and may_leave([*then, *other])):
        return False
    return signatures.of(then) == signatures.of(other) or _may_lead_and_follow(then, other, signatures)


def _may_lead_and_follow(then: Sequence[ast.stmt], other: Sequence[ast.stmt], signatures: Signatures) -> bool:
    """Return whether two branches run the same operations, perhaps a different number of times.

    One rank may lead by calls, and the others follow in a loop or in a function that is passed on.
    """
    free = (ast.For, ast.While, ast.AsyncFor, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    if not any(isinstance(node, free) for statement in [*then, *other] for node in ast.walk(statement)):
        return False
    kinds, others = (
        {
            reached.collective.key
            for statement in statements
            for node in ast.walk(statement)
            if isinstance(node, ast.Call)
            for reached in signatures.of_call(node)
        }
        for statements in (then, other)
    )
    return bool(kinds) and kinds == others


def find_pairs(statements: Sequence[ast.stmt], signatures: Signatures, tests: RankTests) -> set[ast.stmt]:
    """Return the `if` statements that form pairs: one runs on rank 0, the other on all other ranks.

    Both call the same collectives. Example: `if rank != 0: barrier()`, then work, then `if rank == 0: barrier()`.
    Rank 0 works first, and each rank calls the barrier once.
    """
    open_tests: list[tuple[ast.If, RankSubset]] = []
    paired: set[ast.stmt] = set()
    for statement in _flatten(statements):
        if not isinstance(statement, ast.If) or statement.orelse:
            continue
        ranks = tests.ranks(statement.test)
        if ranks is None or ranks is RankSubset.SOME:
            continue
        signature = signatures.of(statement.body)
        for earlier, others in open_tests:
            if others is ranks.opposite and signature and signatures.of(earlier.body) == signature:
                paired |= {earlier, statement}
                open_tests.remove((earlier, others))
                break
        else:
            open_tests.append((statement, ranks))
    return paired


def _flatten(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Iterate over statements, including those in `with` and `try` blocks, which always run in sequence."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.With | ast.AsyncWith):
            yield from _flatten(statement.body)
        elif isinstance(statement, ast.Try):
            yield from _flatten([*statement.body, *statement.orelse, *statement.finalbody])
