"""The walk through a function that finds the collectives which some of its ranks miss."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from drivetrain_lint.flow.bindings import Bindings
from drivetrain_lint.flow.branches import agreeing, branches_agree, text_of
from drivetrain_lint.flow.data_tests import is_data_test
from drivetrain_lint.flow.divergences import Cause, Divergence, Parting, Reached
from drivetrain_lint.flow.exits import is_departure, swallowed
from drivetrain_lint.flow.rank_tests import RankTests
from drivetrain_lint.flow.signatures import Signatures
from drivetrain_lint.reading.imports import written
from drivetrain_lint.reading.script import Function

_TURNS = frozenset({"main_process_first", "local_main_process_first"})
_JOINS = frozenset({"join", "Join", "join_uneven_inputs"})
_Loop = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A walk through one function or module body, in the order of the source.

    Attributes:
        signatures: The reader of collectives.
        tests: The judge of rank conditions.
        bindings: The values of names.
        found: The collectives that were reached after the ranks parted, by cause; filled by the walk.
        paired: The tests of the rank that pair up with another one; filled by the walk.
    """

    signatures: Signatures
    tests: RankTests
    bindings: Bindings
    found: dict[ast.AST, tuple[Cause, list[Reached]]] = field(default_factory=dict)
    paired: set[ast.stmt] = field(default_factory=set)

    def divergences(self) -> list[Divergence]:
        """Return what was found, one for each cause."""
        return [
            Divergence(cause=cause, reached=tuple(sorted(reached, key=lambda each: each.line)))
            for cause, reached in self.found.values()
        ]

    def block(
        self, statements: Sequence[ast.stmt], cause: Cause | None, following: Sequence[ast.stmt] = ()
    ) -> list[Cause]:
        """Walk through statements, and return the causes by which some ranks leave them early.

        Args:
            statements: The statements of one block.
            cause: The reason why only some ranks are here; None if all are.
            following: The statements that run after these, up to the end of the function or loop body.
        """
        departures: list[Cause] = []
        self.paired.update(agreeing(statements, self.signatures, self.tests))
        for index, statement in enumerate(statements):
            rest = [*statements[index + 1 :], *following]
            if is_departure(statement):
                self._expressions([statement], cause)
                if cause is not None and cause.departure is None and self._parts(statement, cause):
                    departures.append(
                        Cause(kind=cause.kind, node=cause.node, test=cause.test, departure=statement)
                    )
                return departures
            inner = None if statement in self.paired else self._statement(statement, cause, rest)
            for departure in inner or ():
                departures.append(departure)
                cause = cause or departure
        return departures

    def _statement(self, statement: ast.stmt, cause: Cause | None, rest: Sequence[ast.stmt]) -> list[Cause]:
        match statement:
            case ast.If():
                return self._if(statement, cause, rest)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(statement, cause)
            case ast.With() | ast.AsyncWith():
                self._expressions([item.context_expr for item in statement.items], cause)
                return self.block(statement.body, cause or _turns(statement), rest)
            case ast.Try() | ast.TryStar():
                return self._try(statement, cause, rest)
            case ast.Match():
                return self._match(statement, cause, rest)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return []
            case _:
                self._expressions([statement], cause)
                return []

    def _if(self, statement: ast.If, cause: Cause | None, rest: Sequence[ast.stmt]) -> list[Cause]:
        self._expressions([statement.test], cause)
        if cause is None and self.tests.ranks(statement.test) is not None:
            if branches_agree(statement, rest, self.signatures, in_loop=self._in_loop(statement)):
                return []
            cause = Cause(kind=Parting.CONDITION, node=statement.test, test=text_of(statement.test))
        elif cause is None and is_data_test(statement.test, self.bindings, self.signatures.names):
            cause = Cause(kind=Parting.DATA, node=statement.test, test=text_of(statement.test))
        first = self.block(statement.body, cause, rest)
        return [*first, *self.block(statement.orelse, cause, rest)]

    def _loop(self, loop: _Loop, cause: Cause | None) -> list[Cause]:
        head = loop.test if isinstance(loop, ast.While) else loop.iter
        self._expressions([head], cause)
        inner = cause
        if cause is None and isinstance(loop, ast.While) and self.tests.ranks(head) is not None:
            inner = Cause(kind=Parting.CONDITION, node=head, test=text_of(head))
        elif (
            cause is None
            and not isinstance(loop, ast.While)
            and self.tests.is_share(head)
            and not self._joins(loop)
        ):
            inner = Cause(kind=Parting.LOOP, node=head, test=text_of(head))
        departures = self.block(loop.body, inner)
        for departure in departures:
            # The next rounds miss what stands before too.
            if not isinstance(departure.departure, ast.Continue):
                line = getattr(departure.departure, "lineno", 0)
                before = [each for each in self.signatures.reached(loop.body) if each.line < line]
                self._record(before, departure)
        after = [each for each in departures if not isinstance(each.departure, ast.Break | ast.Continue)]
        return [*after, *self.block(loop.orelse, cause)]

    def _try(
        self, statement: ast.Try | ast.TryStar, cause: Cause | None, rest: Sequence[ast.stmt]
    ) -> list[Cause]:
        departures = self.block(statement.body, cause, [*statement.orelse, *statement.finalbody, *rest])
        for handler in statement.handlers:
            reason = cause
            if cause is None and swallowed(handler):
                caught = "except:" if handler.type is None else f"except {text_of(handler.type)}:"
                reason = Cause(kind=Parting.HANDLER, node=handler, test=caught)
                trained = [
                    each
                    for each in self.signatures.reached(statement.body)
                    if each.collective.key == "backward"
                ]
                self._record(trained, reason)
            departures += self.block(handler.body, reason, [*statement.finalbody, *rest])
        departures += self.block(statement.orelse, cause, rest)
        return [*departures, *self.block(statement.finalbody, cause, rest)]

    def _match(self, statement: ast.Match, cause: Cause | None, rest: Sequence[ast.stmt]) -> list[Cause]:
        self._expressions([statement.subject], cause)
        tested = [statement.subject, *(case.guard for case in statement.cases if case.guard)]
        if cause is None and any(self.tests.ranks(each) or self.tests.is_number(each) for each in tested):
            bodies = {self.signatures.of(case.body) for case in statement.cases}
            last = statement.cases[-1]
            complete = (
                isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and not last.guard
            )
            if len(bodies | (set() if complete else {()})) > 1 or any(
                is_departure(each) for case in statement.cases for each in case.body
            ):
                cause = Cause(
                    kind=Parting.CONDITION, node=statement.subject, test=f"match {text_of(statement.subject)}"
                )
        return [each for case in statement.cases for each in self.block(case.body, cause, rest)]

    def _expressions(self, nodes: Sequence[ast.AST], cause: Cause | None) -> None:
        """Look at the calls of expressions, and at the parts that only some ranks evaluate."""
        if cause is not None:
            self._record(self.signatures.reached(nodes), cause)
            return
        for node in nodes:
            self._conditional_parts(node)

    def _conditional_parts(self, node: ast.AST) -> None:
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            return
        if isinstance(node, ast.BoolOp):
            for index, value in enumerate(node.values[:-1]):
                if self.tests.ranks(value) is not None:
                    self._part(value, node.values[index + 1 :])
                    return
        elif isinstance(node, ast.IfExp) and self.tests.ranks(node.test) is not None:
            if self.signatures.of([node.body]) != self.signatures.of([node.orelse]):
                self._part(node.test, [node.body, node.orelse])
            return
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            tests = [each for part in node.generators for each in part.ifs if self.tests.ranks(each)]
            elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            if tests:
                self._part(tests[0], elements)
        for child in ast.iter_child_nodes(node):
            self._conditional_parts(child)

    def _part(self, test: ast.expr, nodes: Sequence[ast.AST]) -> None:
        cause = Cause(kind=Parting.CONDITION, node=test, test=text_of(test))
        self._record(self.signatures.reached(nodes), cause)

    def _joins(self, loop: _Loop) -> bool:
        """Return whether a loop stands in a block that lets ranks end at different rounds."""
        around = [each for each in self.bindings.script.enclosing(loop) if isinstance(each, ast.With)]
        calls = [item.context_expr for each in around for item in each.items]
        return any(
            isinstance(call, ast.Call) and written(call.func).rpartition(".")[2] in _JOINS for call in calls
        )

    def _parts(self, statement: ast.stmt, cause: Cause) -> bool:
        """Return whether a departure may leave others behind: after an exception it must skip rounds of a loop."""
        return cause.kind is not Parting.HANDLER or self._in_loop(statement)

    def _in_loop(self, statement: ast.stmt) -> bool:
        for each in self.bindings.script.enclosing(statement):
            if isinstance(each, Function):
                return False
            if isinstance(each, _Loop):
                return True
        return False

    def _record(self, reached: Sequence[Reached], cause: Cause) -> None:
        if cause.kind is Parting.DATA:  # a step that is skipped on one rank keeps no rank waiting
            reached = [each for each in reached if not each.collective.trains]
        if not reached:
            return
        key = cause.departure or cause.node
        _, listed = self.found.setdefault(key, (cause, []))
        listed += [each for each in reached if each not in listed]


def _turns(statement: ast.With | ast.AsyncWith) -> Cause | None:
    for item in statement.items:
        call = item.context_expr
        if isinstance(call, ast.Call) and written(call.func).rpartition(".")[2] in _TURNS:
            return Cause(kind=Parting.TURNS, node=call, test=text_of(call))
    return None
