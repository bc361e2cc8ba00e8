"""The collectives that code runs, in order: two branches with the same signature keep the ranks together."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from drivetrain_lint.flow.collectives import CollectiveNames
from drivetrain_lint.flow.divergences import Reached
from drivetrain_lint.flow.rank_tests import RankTests
from drivetrain_lint.reading.imports import written
from drivetrain_lint.reading.script import Function

# Parts of the names by which scripts ask whether there are several processes.
_SEVERAL = ("distributed", "initialized", "is_available", "world_size", "num_processes", "is_dist", "ddp")

Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signatures:
    """The reader of the collectives of statements and functions.

    Attributes:
        names: The script's collectives.
        tests: The judge of rank conditions.
        known: The collectives of functions; filled on demand.
        sequences: The signatures of functions; filled on demand.
    """

    names: CollectiveNames
    tests: RankTests
    known: dict[Function, tuple[Reached, ...]] = field(default_factory=dict)
    sequences: dict[Function, Signature] = field(default_factory=dict)

    def of(self, statements: Iterable[ast.AST], within: tuple[Function, ...] = ()) -> Signature:
        """Return the nested sequence of operations that statements run."""
        found: list[object] = []
        for each in statements:
            found += self._of_node(each, within)
        return tuple(found)

    def reached(self, nodes: Iterable[ast.AST]) -> list[Reached]:
        """Return the collectives that nodes run, themselves or through functions of the file, in order."""
        return [each for node in nodes for call in evaluated_calls(node) for each in self.of_call(call)]

    def of_call(self, call: ast.Call, within: tuple[Function, ...] = ()) -> list[Reached]:
        """Return the collectives that a call runs: itself, or those of the function of this file that it names."""
        collective = self.names.of(call)
        if collective is not None:
            return [Reached(collective=collective, call=call)]
        function = self.names.script.callee(call)
        if function is None:
            return []
        return [
            Reached(collective=each.collective, call=call, through=(function.name, *each.through))
            for each in self.of_function(function, within)
        ]

    def of_function(self, function: Function, within: tuple[Function, ...] = ()) -> tuple[Reached, ...]:
        """Return the collectives of a function, without those under a test of the rank, told of at their place."""
        if function in self.known:
            return self.known[function]
        if function in within or is_generator(function):
            return ()
        found = [
            reached
            for call in self._unconditional(function.body)
            for reached in self.of_call(call, (*within, function))
        ]
        self.known[function] = tuple(dict.fromkeys(found))
        return self.known[function]

    def _unconditional(self, nodes: Sequence[ast.AST]) -> Iterator[ast.Call]:
        for node in nodes:
            if isinstance(node, ast.If | ast.While) and self.tests.ranks(node.test) is not None:
                continue
            if isinstance(node, Function | ast.ClassDef | ast.Lambda):
                continue
            yield from self._unconditional(list(ast.iter_child_nodes(node)))
            if isinstance(node, ast.Call):
                yield node

    def _of_node(self, node: ast.AST, within: tuple[Function, ...]) -> Signature:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                return ()
            case ast.If() | ast.IfExp():
                then = node.body if isinstance(node.body, list) else [node.body]
                other = node.orelse if isinstance(node.orelse, list) else [node.orelse]
                first, second = self.of(then, within), self.of(other, within)
                head = self.of([node.test], within)
                if (not first or not second) and _asks_for_ranks(node.test):
                    return (*head, *first, *second)
                return head + (first if first == second else (("if", first, second),))
            case ast.For() | ast.AsyncFor() | ast.While():
                inner = self.of(node.body, within)
                head = self.of([node.iter if isinstance(node, ast.For | ast.AsyncFor) else node.test], within)
                return (*head, ("loop", inner)) if inner else head
            case ast.Call():
                found = self.of(ast.iter_child_nodes(node), within)
                if collective := self.names.of(node):
                    return (*found, collective.key)
                function = self.names.script.callee(node)
                if function is None or function in within or is_generator(function):
                    return found
                if function not in self.sequences:
                    self.sequences[function] = self.of(function.body, (*within, function))
                return (*found, *self.sequences[function])
            case _:
                return self.of(ast.iter_child_nodes(node), within)


def _asks_for_ranks(test: ast.expr) -> bool:
    """Return whether a test asks if there are several processes at all, which all of them answer alike."""
    return any(
        any(word in last_part.lower() for word in _SEVERAL)
        for node in ast.walk(test)
        if isinstance(node, ast.Name | ast.Attribute)
        for last_part in [written(node).rpartition(".")[2]]
    )


def is_generator(function: Function) -> bool:
    """Return whether calling a function runs none of its body."""
    return any(
        isinstance(each, ast.Yield | ast.YieldFrom)
        for statement in function.body
        for each in _inner(statement)
    )


def evaluated_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Iterate over the calls that a node evaluates, in order; bodies of functions and lambdas in it do not run."""
    if isinstance(node, Function | ast.ClassDef | ast.Lambda):
        return
    for child in ast.iter_child_nodes(node):
        yield from evaluated_calls(child)
    if isinstance(node, ast.Call):
        yield node


def _inner(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield from _inner(child)
