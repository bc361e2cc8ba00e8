"""The statements by which a rank leaves a block, and leaves other ranks waiting."""

import ast
from collections.abc import Iterable, Sequence

from drivetrain_lint.reading.imports import last_name, word_set, written
from drivetrain_lint.reading.script import own_nodes

_PROCESS_EXITS = frozenset({"sys.exit", "exit", "quit", "os._exit"})
# Raised on every rank alike: for a missing package or feature, a key press that the launcher sends to all,
# drivetrain's own count of skipped steps.
_SHARED = word_set(
    "ImportError ModuleNotFoundError AttributeError NameError NotImplementedError TypeError KeyboardInterrupt "
    "StopIteration GeneratorExit SystemExit SkippedStepsError"
)


def is_departure(node: ast.AST) -> bool:
    """Return whether a statement leaves the block while the other ranks continue.

    An error or an exit with a code other than 0 does not count: the rank fails, and the launcher ends the others.
    """
    if isinstance(node, ast.Return | ast.Break | ast.Continue):
        return True
    call = _process_exit(node)
    return call is not None and all(
        isinstance(each, ast.Constant) and each.value in (0, None) for each in call.args
    )


def always_leaves(statements: Sequence[ast.stmt]) -> ast.stmt | None:
    """Return the statement by which a block is always left; None if the block may run to its end."""
    for statement in statements:
        if is_departure(statement) or _fails(statement):
            return statement
        if isinstance(statement, ast.If) and statement.orelse:
            first, second = always_leaves(statement.body), always_leaves(statement.orelse)
            if first is not None and second is not None:
                return first if type(first) is type(second) else None
        if isinstance(statement, ast.With) and (inner := always_leaves(statement.body)):
            return inner
    return None


def may_leave(statements: Iterable[ast.stmt]) -> bool:
    """Return whether a block may end in a departure."""
    return any(map(is_departure, own_nodes(statements)))


def may_swallow(handler: ast.ExceptHandler) -> bool:
    """Return whether a rank may catch an exception in this handler and continue while other ranks raise none."""
    kinds = handler.type
    listed = [] if kinds is None else kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    if listed and all(last_name(each) in _SHARED for each in listed):
        return False
    return not any(map(_fails, own_nodes(handler.body)))


def _fails(node: ast.AST) -> bool:
    """Return whether a statement ends this rank with an error, which the other ranks do not survive."""
    return isinstance(node, ast.Raise) or (_process_exit(node) is not None and not is_departure(node))


def _process_exit(node: ast.AST) -> ast.Call | None:
    call = node.value if isinstance(node, ast.Expr) else None
    return call if isinstance(call, ast.Call) and written(call.func) in _PROCESS_EXITS else None
