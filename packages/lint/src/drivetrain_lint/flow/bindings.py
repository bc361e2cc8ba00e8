"""The values that names are bound to, by scope."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from drivetrain_lint.reading.imports import written
from drivetrain_lint.reading.script import Function, Scope, Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A name that a statement binds.

    Attributes:
        name: The name as written, such as `loader` or `self.loader`.
        value: The value; of a loop's target None.
        position: The place in a tuple on the left, from 0; None if the value is bound as a whole.
        node: The statement or item that binds.
    """

    name: str
    value: ast.expr | None
    position: int | None
    node: ast.AST


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """The bindings of a script.

    Attributes:
        script: The script that binds them.
        by_scope: The bindings of each scope, in order; attributes of objects are those of the module.
    """

    script: Script
    by_scope: Mapping[ast.AST, Mapping[str, tuple[Binding, ...]]]

    def of(self, node: ast.AST) -> tuple[Binding, ...]:
        """Return the bindings of a name or attribute in its scope, or the scopes around it.

        A parameter hides names of outer scopes, and has no bindings of its own.
        """
        name = written(node)
        if not name:
            return ()
        if "." in name:
            return self.by_scope.get(self.script.document.tree, {}).get(name, ())
        for scope in self._scopes(node):
            if found := self.by_scope.get(scope, {}).get(name):
                return found
            if isinstance(scope, Function) and name in parameters(scope):
                return ()
        return ()

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Return the whole values that a name is bound to, those of its members in tuples left out."""
        return [each.value for each in self.of(node) if each.value is not None and each.position is None]

    def _scopes(self, node: ast.AST) -> Iterator[Scope]:
        scope = self.script.scope_of(node)
        yield scope
        while not isinstance(scope, ast.Module):
            scope = self.script.scope_of(scope)
            yield scope


def parameters(function: Function) -> list[str]:
    """Return the names of a function's parameters."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [each.arg for each in [*listed, arguments.vararg, arguments.kwarg] if each is not None]


def read_bindings(script: Script) -> Bindings:
    """Collect the bindings of a script."""
    found: dict[ast.AST, dict[str, list[Binding]]] = {}
    for node in script.nodes:
        for binding in _bound(node):
            scope = script.document.tree if "." in binding.name else script.scope_of(node)
            found.setdefault(scope, {}).setdefault(binding.name, []).append(binding)
    return Bindings(
        script=script,
        by_scope={
            scope: {
                name: tuple(sorted(listed, key=lambda each: getattr(each.node, "lineno", 0)))
                for name, listed in names.items()
            }
            for scope, names in found.items()
        },
    )


def _bound(node: ast.AST) -> Iterator[Binding]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _targets(target, node.value, node)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        yield from _targets(node.target, node.value, node)
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from _targets(node.target, None, node.target)
    elif isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            if item.optional_vars is not None:
                yield from _targets(item.optional_vars, item.context_expr, node)


def _targets(target: ast.expr, value: ast.expr | None, node: ast.AST) -> Iterator[Binding]:
    if isinstance(target, ast.Tuple | ast.List):
        pairs = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
        for position, element in enumerate(target.elts):
            inner = element.value if isinstance(element, ast.Starred) else element
            if pairs is not None:
                yield from _targets(inner, pairs[position], node)
            elif name := written(inner):
                yield Binding(name=name, value=value, position=position, node=node)
    elif name := written(target):
        yield Binding(name=name, value=value, position=None, node=node)
