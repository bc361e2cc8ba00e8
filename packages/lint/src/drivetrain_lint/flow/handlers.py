"""The exception handlers that one rank may enter alone, and then go on."""

import ast

from drivetrain_lint.flow.exits import raises
from drivetrain_lint.reading.imports import word_set, written

# What every rank meets alike: a missing package, a missing feature, a key press that the launcher sends to all.
_SHARED = word_set(
    "ImportError ModuleNotFoundError AttributeError NameError NotImplementedError TypeError KeyboardInterrupt "
    "StopIteration GeneratorExit SystemExit"
)


def swallowed(handler: ast.ExceptHandler) -> bool:
    """Return whether one rank may catch an exception in this handler and go on, while the others raise none."""
    kinds = handler.type
    listed = [] if kinds is None else kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    names = [written(each).rpartition(".")[2] for each in listed]
    if names and all(name in _SHARED for name in names):
        return False
    return not raises(handler.body)
