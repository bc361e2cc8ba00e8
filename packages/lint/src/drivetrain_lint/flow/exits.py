"""The statements by which control leaves a block, and those that keep other ranks waiting."""

import ast
from collections.abc import Iterator, Sequence

from drivetrain_lint.reading.imports import word_set, written
from drivetrain_lint.reading.script import Function

_PROCESS_EXITS = frozenset({"sys.exit", "exit", "quit", "os._exit"})
# What every rank meets alike: a missing package, a missing feature, a key press that the launcher sends to all.
_SHARED = word_set(
    "ImportError ModuleNotFoundError AttributeError NameError NotImplementedError TypeError KeyboardInterrupt "
    "StopIteration GeneratorExit SystemExit"
)


def is_departure(statement: ast.stmt) -> bool:
    """Return whether a statement leaves the block and the other ranks go on.

    An error, or an exit with a code other than 0, is none: it fails the rank, and the launcher ends the others.
    """
    return isinstance(statement, ast.Return | ast.Break | ast.Continue) or leaves_process(statement)


def leaves_process(statement: ast.stmt) -> bool:
    """Return whether a statement ends the process with success."""
    if not _is_process_exit(statement):
        return False
    call = statement.value  # type: ignore[attr-defined]
    assert isinstance(call, ast.Call)
    return all(isinstance(each, ast.Constant) and each.value in (0, None) for each in call.args)


def always_leaves(statements: Sequence[ast.stmt]) -> ast.stmt | None:
    """Return the statement with which a block always ends before what follows it; None if it may run through."""
    for statement in statements:
        if is_departure(statement) or isinstance(statement, ast.Raise) or _is_process_exit(statement):
            return statement
        if isinstance(statement, ast.If) and statement.orelse:
            first, second = always_leaves(statement.body), always_leaves(statement.orelse)
            if first is not None and second is not None:
                return first if type(first) is type(second) else None
        if isinstance(statement, ast.With) and (inner := always_leaves(statement.body)):
            return inner
    return None


def raises(statements: Sequence[ast.stmt]) -> bool:
    """Return whether a block may end in an error, which the other ranks do not survive."""
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.stmt) and _is_process_exit(node) and not leaves_process(node))
        for statement in statements
        for node in same_function(statement)
    )


def swallowed(handler: ast.ExceptHandler) -> bool:
    """Return whether one rank may catch an exception in this handler and go on, while the others raise none."""
    kinds = handler.type
    listed = [] if kinds is None else kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    names = [written(each).rpartition(".")[2] for each in listed]
    if names and all(name in _SHARED for name in names):
        return False
    return not raises(handler.body)


def same_function(node: ast.AST) -> Iterator[ast.AST]:
    """Iterate over a node and those in it, without those of functions in it."""
    if isinstance(node, Function | ast.Lambda):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield from same_function(child)


def _is_process_exit(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and written(statement.value.func) in _PROCESS_EXITS
    )
