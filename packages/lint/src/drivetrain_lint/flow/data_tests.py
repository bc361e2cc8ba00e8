"""The tests of values that each rank computes from its own batch."""

import ast

from drivetrain_lint.flow.bindings import Bindings
from drivetrain_lint.flow.collectives import CollectiveNames
from drivetrain_lint.reading.imports import last_name, written

_TESTS_OF_FINITENESS = frozenset({"isnan", "isinf", "isfinite"})
# Names by which scripts say that a value was agreed on elsewhere.
_AGREED_WORDS = ("reduce", "gather", "sync", "broadcast", "global", "avg", "average", "norm")
_DEPTH = 4


def is_data_test(test: ast.expr, bindings: Bindings, collectives: CollectiveNames) -> bool:
    """Return whether a test asks if a value of this rank alone is finite."""
    return _asks(test, bindings, _DEPTH) and not _agreed(test, bindings, collectives, _DEPTH)


def _asks(test: ast.expr, bindings: Bindings, depth: int) -> bool:
    if depth == 0:
        return False
    for call in ast.walk(test):
        if isinstance(call, ast.Call):
            function = call.func
            name = function.attr if isinstance(function, ast.Attribute) else written(function)
            if name in _TESTS_OF_FINITENESS:
                return True
    plain = test.operand if isinstance(test, ast.UnaryOp) else test
    values = bindings.values(plain) if isinstance(plain, ast.Name) else []
    return any(_asks(value, bindings, depth - 1) for value in values)


def _agreed(node: ast.AST, bindings: Bindings, collectives: CollectiveNames, depth: int) -> bool:
    """Return whether all ranks have one value, which a collective has given or may have written into it."""
    if depth == 0:
        return False
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and _spreads(each, collectives):
            return True
        name = written(each)
        if not name:
            continue
        if any(word in last_name(each).lower() for word in _AGREED_WORDS):
            return True
        for call in bindings.script.calls(bindings.script.scope_of(each)):
            if _spreads(call, collectives) and name in map(written, call.args):
                return True
        values = bindings.values(each, with_members=True)
        if any(_agreed(value, bindings, collectives, depth - 1) for value in values):
            return True
    return False


def _spreads(call: ast.Call, collectives: CollectiveNames) -> bool:
    """Return whether a call gives all ranks one value."""
    found = collectives.of(call)
    return found is not None and found.key not in ("backward", "prepare") and not found.trains
