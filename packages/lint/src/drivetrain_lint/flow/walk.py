"""The walk through a function that finds the collectives that some ranks miss."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from drivetrain_lint.flow.bindings import Bindings
from drivetrain_lint.flow.branches import branches_agree, find_pairs
from drivetrain_lint.flow.divergences import Cause, Divergence, Parting, Reached, text_of
from drivetrain_lint.flow.exits import is_departure, may_swallow
from drivetrain_lint.flow.rank_tests import RankTests
from drivetrain_lint.flow.signatures import Signatures
from drivetrain_lint.reading.imports import last_name
from drivetrain_lint.reading.script import Loop

_TURNS = frozenset({"main_process_first", "local_main_process_first"})
# Blocks that let ranks end at different rounds of a loop.
_JOINS = frozenset({"join", "Join", "join_uneven_inputs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A walk through one function or module body, in the order of the source.

    The walk fills `found` with the collectives reached after the ranks parted, by cause, and `paired` with the `if`
    statements on the rank that form pairs.
    """

    signatures: Signatures
    tests: RankTests
    bindings: Bindings
    found: dict[ast.AST, tuple[Cause, list[Reached]]] = field(default_factory=dict)
    paired: set[ast.stmt] = field(default_factory=set)

    def divergences(self) -> list[Divergence]:
        """Return the divergences, one for each cause."""
        return [
            Divergence(cause=cause, reached=tuple(sorted(reached, key=lambda each: each.line)))
            for cause, reached in self.found.values()
        ]

    def block(
        self, statements: Sequence[ast.stmt], cause: Cause | None, following: Sequence[ast.stmt] = ()
    ) -> list[Cause]:
        """Walk through statements, and return the causes by which some ranks leave them early.

        `cause` is the reason why only some ranks are here; `following` runs afterwards, up to the end of the function
        or loop body.
        """
        departures: list[Cause] = []
        self.paired.update(find_pairs(statements, self.signatures, self.tests))
        for index, statement in enumerate(statements):
            if is_departure(statement):
                self._walk_expressions([statement], cause)
                # After an exception, a departure leaves others behind only if it skips rounds of a loop.
                if (
                    cause is not None
                    and cause.departure is None
                    and (cause.kind is not Parting.HANDLER or self._is_in_loop(statement))
                ):
                    departures.append(replace(cause, departure=statement))
                return departures
            if statement not in self.paired:
                inner = self._walk_statement(statement, cause, [*statements[index + 1 :], *following])
                departures += inner
                cause = cause or next(iter(inner), None)
        return departures

    def _walk_statement(
        self, statement: ast.stmt, cause: Cause | None, rest: Sequence[ast.stmt]
    ) -> list[Cause]:
        match statement:
            case ast.If():
                test = statement.test
                self._walk_expressions([test], cause)
                if cause is None and self.tests.ranks(test):
                    if branches_agree(statement, rest, self.signatures, in_loop=self._is_in_loop(statement)):
                        return []
                    cause = Cause(kind=Parting.CONDITION, node=test, test=text_of(test))
                elif cause is None and self.tests.is_data_test(test):
                    cause = Cause(kind=Parting.DATA, node=test, test=text_of(test))
                return [*self.block(statement.body, cause, rest), *self.block(statement.orelse, cause, rest)]
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._walk_loop(statement, cause)
            case ast.With() | ast.AsyncWith():
                contexts = [item.context_expr for item in statement.items]
                self._walk_expressions(contexts, cause)
                turns = next((each for each in contexts if _calls_one_of(each, _TURNS)), None)
                if cause is None and turns is not None:
                    cause = Cause(kind=Parting.TURNS, node=turns, test=text_of(turns))
                return self.block(statement.body, cause, rest)
            case ast.Try() | ast.TryStar():
                after = [*statement.orelse, *statement.finalbody, *rest]
                departures = self.block(statement.body, cause, after)
                for handler in statement.handlers:
                    reason = cause
                    if cause is None and may_swallow(handler):
                        caught = "except:" if handler.type is None else f"except {text_of(handler.type)}:"
                        reason = Cause(kind=Parting.HANDLER, node=handler, test=caught)
                        reached = self.signatures.reached(statement.body)
                        self._record([each for each in reached if each.collective.key == "backward"], reason)
                    departures += self.block(handler.body, reason, [*statement.finalbody, *rest])
                departures += self.block(statement.orelse, cause, rest)
                return [*departures, *self.block(statement.finalbody, cause, rest)]
            case ast.Match():
                return self._walk_match(statement, cause, rest)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return []
            case _:
                self._walk_expressions([statement], cause)
                return []

    def _walk_loop(self, loop: Loop, cause: Cause | None) -> list[Cause]:
        head = loop.test if isinstance(loop, ast.While) else loop.iter
        self._walk_expressions([head], cause)
        inner = cause
        if cause is None and isinstance(loop, ast.While):
            if self.tests.ranks(head):
                inner = Cause(kind=Parting.CONDITION, node=head, test=text_of(head))
        elif cause is None and self.tests.is_share(head):
            around = [each for each in self.bindings.script.enclosing(loop) if isinstance(each, ast.With)]
            if not any(_calls_one_of(item.context_expr, _JOINS) for each in around for item in each.items):
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

    def _walk_match(self, statement: ast.Match, cause: Cause | None, rest: Sequence[ast.stmt]) -> list[Cause]:
        subject, cases = statement.subject, statement.cases
        self._walk_expressions([subject], cause)
        tested = [subject, *(case.guard for case in cases if case.guard)]
        if cause is None and any(self.tests.ranks(each) or self.tests.is_number(each) for each in tested):
            bodies = {self.signatures.of(case.body) for case in cases}
            last = cases[-1]
            if last.guard or not isinstance(last.pattern, ast.MatchAs) or last.pattern.pattern is not None:
                bodies.add(())  # no case may match
            if len(bodies) > 1 or any(is_departure(each) for case in cases for each in case.body):
                cause = Cause(kind=Parting.CONDITION, node=subject, test=f"match {text_of(subject)}")
        return [each for case in cases for each in self.block(case.body, cause, rest)]

    def _walk_expressions(self, nodes: Iterable[ast.AST], cause: Cause | None) -> None:
        """Visit the calls in expressions, and the parts that only some ranks evaluate."""
        if cause is not None:
            self._record(self.signatures.reached(nodes), cause)
            return
        for node in nodes:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef():
                    continue
                case ast.BoolOp(values=[*values, _]):
                    first = next((index for index, each in enumerate(values) if self.tests.ranks(each)), None)
                    if first is not None:
                        self._record_parting(values[first], node.values[first + 1 :])
                        continue
                case ast.IfExp(test=test) if self.tests.ranks(test):
                    if self.signatures.of([node.body]) != self.signatures.of([node.orelse]):
                        self._record_parting(test, [node.body, node.orelse])
                    continue
                case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                    tests = [each for part in node.generators for each in part.ifs if self.tests.ranks(each)]
                    if tests:
                        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                        self._record_parting(tests[0], elements)
                case _:
                    pass
            self._walk_expressions(ast.iter_child_nodes(node), None)

    def _record_parting(self, test: ast.expr, nodes: Sequence[ast.AST]) -> None:
        cause = Cause(kind=Parting.CONDITION, node=test, test=text_of(test))
        self._record(self.signatures.reached(nodes), cause)

    def _is_in_loop(self, statement: ast.stmt) -> bool:
        return any(isinstance(each, Loop) for each in self.bindings.script.around(statement))

    def _record(self, reached: Sequence[Reached], cause: Cause) -> None:
        if cause.kind is Parting.DATA:  # a step that is skipped on one rank keeps no rank waiting
            reached = [each for each in reached if not each.collective.trains]
        if reached:
            _, listed = self.found.setdefault(cause.departure or cause.node, (cause, []))
            listed += [each for each in reached if each not in listed]


def _calls_one_of(node: ast.AST, names: frozenset[str]) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) in names
