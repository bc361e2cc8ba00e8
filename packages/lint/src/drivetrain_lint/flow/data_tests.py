"""The tests of values that each rank computes from its own batch."""

import ast

from drivetrain_lint.flow.bindings import Bindings
from drivetrain_lint.flow.collectives import CollectiveNames
from drivetrain_lint.reading.imports import written

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
    for node in ast.walk(test):
        function = node.func if isinstance(node, ast.Call) else None
        name = function.attr if isinstance(function, ast.Attribute) else written(function or node)
        if function is not None and name in _TESTS_OF_FINITENESS:
            return True
    plain = test.operand if isinstance(test, ast.UnaryOp) else test
    if isinstance(plain, ast.Name):
        return any(_asks(value, bindings, depth - 1) for value in bindings.values(plain))
    return False


def _agreed(node: ast.AST, bindings: Bindings, collectives: CollectiveNames, depth: int) -> bool:
    if depth == 0:
        return False
    script = bindings.script
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and _spreads(each, collectives):
            return True
        if isinstance(each, ast.Name | ast.Attribute):
            last = written(each).rpartition(".")[2].lower()
            if any(word in last for word in _AGREED_WORDS) or _meets_collective(
                each, script.scope_of(each), collectives
            ):
                return True
            values = [binding.value for binding in bindings.of(each) if binding.value is not None]
            if any(_agreed(value, bindings, collectives, depth - 1) for value in values):
                return True
    return False


def _meets_collective(name: ast.expr, scope: ast.AST, collectives: CollectiveNames) -> bool:
    """Return whether a name is handed to a collective in its scope, which may write the agreed value into it."""
    text = written(name)
    return bool(text) and any(
        written(argument) == text
        for call in collectives.script.calls(scope)
        if _spreads(call, collectives)
        for argument in call.args
    )


def _spreads(call: ast.Call, collectives: CollectiveNames) -> bool:
    """Return whether a call gives all ranks one value."""
    found = collectives.of(call)
    return found is not None and found.key not in ("backward", "prepare") and not found.trains
