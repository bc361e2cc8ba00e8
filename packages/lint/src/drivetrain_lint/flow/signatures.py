"""The collectives that code runs, in order: two branches with the same signature keep the ranks together."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from drivetrain_lint.flow.collectives import CollectiveNames
from drivetrain_lint.flow.divergences import Reached
from drivetrain_lint.flow.rank_tests import RankTests
from drivetrain_lint.reading.imports import last_name
from drivetrain_lint.reading.script import Function, own_nodes

# Parts of the names by which scripts ask whether there are several processes, which all of them answer alike.
_SEVERAL = ("distributed", "initialized", "is_available", "world_size", "num_processes", "is_dist", "ddp")

Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signatures:
    """The reader of the collectives of statements and functions, with a cache for functions."""

    names: CollectiveNames
    tests: RankTests
    known: dict[Function, tuple[Reached, ...]] = field(default_factory=dict)
    sequences: dict[Function, Signature] = field(default_factory=dict)

    def of(self, statements: Iterable[ast.AST], within: tuple[Function, ...] = ()) -> Signature:
        """Return the nested sequence of operations that statements run."""
        return tuple(operation for each in statements for operation in self._read_node(each, within))

    def reached(self, nodes: Iterable[ast.AST]) -> list[Reached]:
        """Return the collectives that nodes run, directly or through functions of the file, in order."""
        calls = self._evaluated_calls(nodes, under_tests=True)
        return [each for call in calls for each in self.of_call(call)]

    def of_call(self, call: ast.Call, within: tuple[Function, ...] = ()) -> list[Reached]:
        """Return the collectives that a call runs: the call itself, or those in the function that it calls."""
        collective = self.names.of(call)
        if collective is not None:
            return [Reached(collective=collective, call=call)]
        function = self.names.script.callee(call)
        return [] if function is None else self.through(function, call, within)

    def through(self, function: Function, call: ast.Call, within: tuple[Function, ...] = ()) -> list[Reached]:
        """Return the collectives that a call of a function runs, except those under a test of the rank."""
        if function not in self.known:
            if function in within or _is_generator(function):
                return []
            calls = self._evaluated_calls(function.body, under_tests=False)
            found = [each for inner in calls for each in self.of_call(inner, (*within, function))]
            self.known[function] = tuple(dict.fromkeys(found))
        return [
            Reached(collective=each.collective, call=call, through=(function.name, *each.through))
            for each in self.known[function]
        ]

    def _evaluated_calls(self, nodes: Iterable[ast.AST], *, under_tests: bool) -> Iterator[ast.Call]:
        """Iterate over the calls that nodes evaluate, in order: arguments first, and no body of an inner function."""
        for node in nodes:
            if isinstance(node, Function | ast.ClassDef | ast.Lambda):
                continue
            if not under_tests and isinstance(node, ast.If | ast.While) and self.tests.ranks(node.test):
                continue
            yield from self._evaluated_calls(ast.iter_child_nodes(node), under_tests=under_tests)
            if isinstance(node, ast.Call):
                yield node

    def _read_node(self, node: ast.AST, within: tuple[Function, ...]) -> Signature:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                return ()
            case ast.If() | ast.IfExp():
                first, second = (
                    self.of(side if isinstance(side, list) else [side], within)
                    for side in (node.body, node.orelse)
                )
                head = self.of([node.test], within)
                names = [last_name(each).lower() for each in ast.walk(node.test)]
                if (not first or not second) and any(word in name for name in names for word in _SEVERAL):
                    return (*head, *first, *second)
                return head + (first if first == second else (("if", first, second),))
            case ast.For() | ast.AsyncFor() | ast.While():
                inner = self.of(node.body, within)
                head = self.of([node.test if isinstance(node, ast.While) else node.iter], within)
                return (*head, ("loop", inner)) if inner else head
            case ast.Call():
                found = self.of(ast.iter_child_nodes(node), within)
                if collective := self.names.of(node):
                    return (*found, collective.key)
                function = self.names.script.callee(node)
                if function is None or function in within or _is_generator(function):
                    return found
                if function not in self.sequences:
                    self.sequences[function] = self.of(function.body, (*within, function))
                return (*found, *self.sequences[function])
            case _:
                return self.of(ast.iter_child_nodes(node), within)


def _is_generator(function: Function) -> bool:
    """Return whether calling a function runs none of its body."""
    return any(isinstance(each, ast.Yield | ast.YieldFrom) for each in own_nodes(function.body))
