"""The values that names are bound to, by scope."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain_lint.reading.imports import written
from drivetrain_lint.reading.script import Function, Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A binding of a name as written, such as `self.loader`; the value is None for the target of a loop.

    `position` is the name's place in a tuple of targets, from 0; None if the name gets the whole value.
    """

    name: str
    value: ast.expr | None
    position: int | None
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """The bindings of a script by scope, in order; attributes of objects are those of the module."""

    script: Script
    by_scope: Mapping[ast.AST, Mapping[str, Sequence[Binding]]]

    def of(self, node: ast.AST) -> Sequence[Binding]:
        """Return the bindings of a name or attribute in its scope, or the scopes around it.

        A parameter hides names of outer scopes, and has no bindings of its own.
        """
        name = written(node)
        if "." in name:
            return self.in_scope(self.script.document.tree, name)
        for scope in self.script.enclosing(node) if name else ():
            if found := self.in_scope(scope, name):
                return found
            parameters = ast.walk(scope.args) if isinstance(scope, Function) else ()
            if any(isinstance(each, ast.arg) and each.arg == name for each in parameters):
                return ()
        return ()

    def in_scope(self, scope: ast.AST, name: str) -> Sequence[Binding]:
        """Return the bindings of a name in one scope."""
        return self.by_scope.get(scope, {}).get(name, ())

    def values(self, node: ast.AST, *, with_members: bool = False) -> list[ast.expr]:
        """Return the values that a name is bound to; `with_members` adds tuples from which it takes an element."""
        return [
            each.value
            for each in self.of(node)
            if each.value is not None and (with_members or each.position is None)
        ]


def read_bindings(script: Script) -> Bindings:
    """Collect the bindings of a script."""
    found: dict[ast.AST, dict[str, list[Binding]]] = {}
    for node in script.nodes:
        bound: list[tuple[ast.expr | None, ast.expr | None]]
        match node:
            case ast.Assign():
                bound = [(target, node.value) for target in node.targets]
            case ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
                bound = [(node.target, node.value)]
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                bound = [(node.target, None)]
            case ast.With() | ast.AsyncWith():
                bound = [(item.optional_vars, item.context_expr) for item in node.items]
            case _:
                continue
        for target, value in bound:
            for binding in _bind(target, value) if target is not None else ():
                scope = script.document.tree if "." in binding.name else script.scope_of(node)
                found.setdefault(scope, {}).setdefault(binding.name, []).append(binding)
    return Bindings(script=script, by_scope=found)


def _bind(target: ast.expr, value: ast.expr | None) -> Iterator[Binding]:
    if isinstance(target, ast.Tuple | ast.List):
        pairs = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
        for position, element in enumerate(target.elts):
            inner = element.value if isinstance(element, ast.Starred) else element
            if pairs is not None:
                yield from _bind(inner, pairs[position])
            elif name := written(inner):
                yield Binding(name=name, value=value, position=position, line=target.lineno)
    elif name := written(target):
        yield Binding(name=name, value=value, position=None, line=target.lineno)
