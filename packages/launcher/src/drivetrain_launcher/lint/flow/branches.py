"""The branches of a test of the rank, and the pairs of tests that keep ranks together."""

import ast
from collections.abc import Iterator, Sequence
from typing import cast

from drivetrain_launcher.lint.flow.exits import always_leaves, is_departure
from drivetrain_launcher.lint.flow.rank_tests import Ranks, RankTests
from drivetrain_launcher.lint.flow.signatures import Signature, Signatures

_LONGEST_TEXT = 60


def branches_agree(
    statement: ast.If, rest: Sequence[ast.stmt], signatures: Signatures, *, in_loop: bool
) -> bool:
    """Return whether both sides of a test run the same collectives, up to the end of the function or loop body.

    A branch that always returns or continues is compared with what the other one goes on with. Any other departure
    makes them differ: the walk asks whether it skips a collective.

    Args:
        statement: The test.
        rest: What follows it, up to the end of the function or, in a loop, of the loop's body.
        signatures: The reader of collectives.
        in_loop: Whether the test is in a loop, which a return leaves too.
    """
    then, other = list(statement.body), list(statement.orelse)
    first, second = always_leaves(then), always_leaves(other)
    ends = ast.Continue if in_loop else ast.Return
    if isinstance(first, ends) and second is None and not _may_leave(other):
        other = [*other, *rest]
    elif isinstance(second, ends) and first is None and not _may_leave(then):
        then = [*then, *rest]
    elif type(first) is not type(second) or (first is None and _may_leave([*then, *other])):
        return False
    return same_calls(signatures.of(then), signatures.of(other))


def same_calls(first: Signature, second: Signature) -> bool:
    """Return whether two branches run the same collectives.

    Where one of them loops, the numbers of rounds are not known: the operations that occur are compared.
    """
    if first == second:
        return True
    kinds, others = set(_operations(first)), set(_operations(second))
    return bool(kinds) and kinds == others and ("loop" in str(first) or "loop" in str(second))


def _operations(signature: Signature) -> Iterator[str]:
    for each in signature:
        if isinstance(each, tuple):
            yield from _operations(cast("Signature", each)[1:] if each[:1] in (("if",), ("loop",)) else each)
        else:
            yield str(each)


def _in_order(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Iterate over the statements that always run one after the other, those in `with` and `try` included."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.With | ast.AsyncWith):
            yield from _in_order(statement.body)
        elif isinstance(statement, ast.Try):
            yield from _in_order([*statement.body, *statement.orelse, *statement.finalbody])


def _may_leave(statements: Sequence[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.stmt) and is_departure(node)
        for statement in statements
        for node in ast.walk(statement)
    )


def agreeing(statements: Sequence[ast.stmt], signatures: Signatures, tests: RankTests) -> set[ast.stmt]:
    """Return the tests of one block that pair up: rank 0's collectives, and then the same on the other ranks.

    `if rank != 0: barrier()`, work, `if rank == 0: barrier()` lets rank 0 work first; each rank calls it once.
    """
    open_tests: list[tuple[ast.If, Ranks]] = []
    paired: set[ast.stmt] = set()
    for statement in _in_order(statements):
        if not isinstance(statement, ast.If) or statement.orelse:
            continue
        ranks = tests.ranks(statement.test)
        if ranks is None or ranks is Ranks.SOME:
            continue
        for earlier in open_tests:
            if earlier[1] is ranks.opposite and _run_the_same(earlier[0], statement, signatures):
                paired |= {earlier[0], statement}
                open_tests.remove(earlier)
                break
        else:
            open_tests.append((statement, ranks))
    return paired


def _run_the_same(first: ast.If, second: ast.If, signatures: Signatures) -> bool:
    signature = signatures.of(first.body)
    return bool(signature) and signature == signatures.of(second.body)


def text_of(node: ast.expr) -> str:
    """Return the source of an expression in one line, shortened."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
