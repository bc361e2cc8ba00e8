"""The parts of training loops that rules of several files ask for."""

import ast
from collections.abc import Iterator, Sequence

from drivetrain_lint.flow.bindings import Bindings
from drivetrain_lint.flow.program import Program
from drivetrain_lint.reading.imports import written
from drivetrain_lint.reading.script import Function, Scope, Script

Loop = ast.For | ast.AsyncFor | ast.While


def scopes(program: Program) -> Iterator[Scope]:
    """Iterate over the module and its functions."""
    yield program.script.document.tree
    yield from program.script.all_functions


def own_calls(script: Script, within: ast.AST) -> Iterator[ast.Call]:
    """Iterate over the calls of a function, the module, or a statement, without those of functions in it."""
    return (node for node in script.own_nodes(within) if isinstance(node, ast.Call))


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name; empty for other expressions."""
    return written(node).rpartition(".")[2]


def is_backward(script: Script, call: ast.Call) -> bool:
    """Return whether a call is a `backward`, the Accelerator's or a loss's."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "backward"
        and not script.name_of(call.func).startswith("torch.autograd")
    )


def is_optimizer(name: str, node: ast.AST, bindings: Bindings) -> bool:
    """Return whether an expression holds an optimizer, by its name or by what it was made of."""
    last = name.rpartition(".")[2].lower()
    if "sched" in last:
        return False
    made = [
        bindings.script.name_of(value.func) for value in bindings.values(node) if isinstance(value, ast.Call)
    ]
    return (
        "optim" in last
        or last == "opt"
        or any(each.startswith("torch.optim.") and ".lr_scheduler." not in each for each in made)
    )


def straight_line(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Iterate over the statements that run one after the other, those in `with` blocks included."""
    for statement in statements:
        if isinstance(statement, ast.With | ast.AsyncWith):
            yield from straight_line(statement.body)
        else:
            yield statement


def blocks(script: Script, scope: Scope) -> Iterator[list[ast.stmt]]:
    """Iterate over the statement lists of a scope."""
    for node in [scope, *script.own_nodes(scope)]:
        if node is not scope and isinstance(node, Function | ast.ClassDef):
            continue
        for field in ("body", "orelse", "finalbody"):
            listed = getattr(node, field, None)
            if isinstance(listed, list) and listed:
                yield listed


def loops_around(script: Script, node: ast.AST) -> list[Loop]:
    """Return the loops of the same function around a node, the inner first."""
    found: list[Loop] = []
    for each in script.enclosing(node):
        if isinstance(each, Function):
            break
        if isinstance(each, Loop):
            found.append(each)
    return found


def conditions_around(script: Script, node: ast.AST, *, until: ast.AST | None = None) -> list[ast.If]:
    """Return the `if` statements of the same function around a node, up to another node."""
    found: list[ast.If] = []
    for each in script.enclosing(node):
        if isinstance(each, Function) or each is until:
            break
        if isinstance(each, ast.If):
            found.append(each)
    return found
