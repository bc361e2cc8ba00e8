"""Expressions with different values on different ranks: tests of the rank or of its own data, and uneven loops."""

import ast
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from drivetrain_lint.flow.bindings import Bindings
from drivetrain_lint.flow.collectives import CollectiveNames
from drivetrain_lint.reading.imports import last_name, word_set, written
from drivetrain_lint.reading.script import Function, own_nodes

_FLAGS = word_set(
    "is_first_worker is_global_zero is_last_process is_local_main_process is_local_process_zero is_main "
    "is_main_process is_main_proc is_main_rank is_master is_master_process is_primary is_rank0 is_rank_0 "
    "is_rank_zero is_world_process_zero is_local_master is_local_master_process is_local_primary master_process"
)
_NUMBERS = word_set(
    "ddp_local_rank ddp_rank dp_rank global_rank local_process_index local_rank node_rank "
    "process_index rank world_rank"
)
RANK_WORDS = _FLAGS | _NUMBERS  # names that always hold a rank or a test of the rank
_NUMBER_CALLS = frozenset(
    {"get_rank", "get_local_rank", "get_global_rank", "get_node_rank", "get_node_local_rank"}
)
_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"}
)
_CONVERSIONS = frozenset({"bool", "int", "str"})
# Calls that return as many items as they are given.
_SAME_LENGTH = frozenset(
    {"enumerate", "tqdm", "list", "tuple", "sorted", "reversed", "iter", "track", "trange"}
)
_TESTS_OF_FINITENESS = frozenset({"isnan", "isinf", "isfinite"})
# Names by which scripts say that a value was agreed on elsewhere.
_AGREED_WORDS = ("reduce", "gather", "sync", "broadcast", "global", "avg", "average", "norm")
_DEPTH = 6
_DATA_DEPTH = 4


class RankSubset(Enum):
    """The ranks on which a test is true."""

    MAIN = "main"
    OTHERS = "others"
    SOME = "some"

    @property
    def opposite(self) -> "RankSubset":
        """The ranks on which the test is false."""
        opposites = {RankSubset.MAIN: RankSubset.OTHERS, RankSubset.OTHERS: RankSubset.MAIN}
        return opposites.get(self, RankSubset.SOME)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTests:
    """The test of a script's expressions for rank dependence; results of collectives are equal on all ranks.

    Results are cached, because the walk reaches a function's tests at each call of the function.
    """

    bindings: Bindings
    collectives: CollectiveNames
    known: dict[tuple[ast.expr, int], RankSubset | None] = field(default_factory=dict)

    def ranks(self, test: ast.expr, depth: int = _DEPTH) -> RankSubset | None:
        """Return the ranks on which a test may be true; None if it does not depend on the rank."""
        if depth == 0:
            return None
        if (test, depth) not in self.known:
            self.known[test, depth] = self._judge(test, depth)
        return self.known[test, depth]

    def _judge(self, test: ast.expr, depth: int) -> RankSubset | None:
        match test:
            case ast.UnaryOp(op=ast.Not()):
                found = self.ranks(test.operand, depth)
                return None if found is None else found.opposite
            case ast.BoolOp():
                return self._join(test.values, depth)
            case ast.Compare():
                return self._compare(test, depth)
            case ast.IfExp():
                return self._join([test.test, test.body, test.orelse], depth)
            case ast.NamedExpr():
                return self.ranks(test.value, depth)
            case ast.Call():
                return self._judge_call(test, depth)
            case ast.Name() | ast.Attribute():
                if self._is_agreed(test):
                    return None
                if values := self.bindings.values(test):
                    return self._first(values, depth)
                last = _last(test)
                if last in _FLAGS and not self.bindings.of(test):
                    return RankSubset.SOME if last == "is_last_process" else RankSubset.MAIN
                # The truth of a rank that another file computes: `rank` alone may be that of a matrix.
                return RankSubset.OTHERS if last in _NUMBERS and last != "rank" else None
            case _:
                return RankSubset.SOME if self.is_number(test, depth) else None

    def is_number(self, node: ast.expr, depth: int = _DEPTH) -> bool:
        """Return whether an expression is a rank or is computed from a rank."""
        if depth == 0:
            return False
        match node:
            case ast.Name() | ast.Attribute():
                if self._is_agreed(node):
                    return False
                if values := self.bindings.values(node):
                    return any(self.is_number(each, depth - 1) for each in values)
                return _last(node) in _NUMBERS
            case ast.BinOp():
                return self.is_number(node.left, depth) or self.is_number(node.right, depth)
            case ast.IfExp():
                return self.is_number(node.body, depth) or self.is_number(node.orelse, depth)
            case ast.BoolOp():
                return any(self.is_number(each, depth) for each in node.values)
            case ast.Subscript():
                return _is_environ(node.value) and _is_variable(node.slice)
            case ast.Call():
                return self._is_numeric_call(node, depth)
            case _:
                return False

    def is_share(self, node: ast.expr, depth: int = _DEPTH) -> bool:
        """Return whether a sequence is a rank's share of data, with a length that may differ between ranks."""
        if depth == 0:
            return False
        match node:
            case ast.Call():
                name = last_name(node.func)
                if name == "range":
                    counted = [each.args[0] for each in node.args if isinstance(each, ast.Call) and each.args]
                    return any(map(self.is_number, node.args)) or any(
                        self.is_share(each, depth) for each in counted
                    )
                if name == "split_between_processes":
                    return not any(each.arg == "apply_padding" for each in node.keywords)
                if name == "zip":
                    return bool(node.args) and all(self.is_share(each, depth) for each in node.args)
                return name in _SAME_LENGTH and bool(node.args) and self.is_share(node.args[0], depth)
            case ast.Subscript(slice=ast.Slice() as part):
                bounds = (part.lower, part.upper, part.step)
                return any(each is not None and self.is_number(each) for each in bounds)
            case ast.Name() | ast.Attribute():
                values = self.bindings.values(node)
                return bool(values) and all(self.is_share(each, depth - 1) for each in values)
            case _:
                return False

    def is_data_test(self, test: ast.expr) -> bool:
        """Return whether a test asks if a value of only this rank is finite."""
        return self._asks_finite(test, _DATA_DEPTH) and not self._is_shared(test, _DATA_DEPTH)

    def _asks_finite(self, test: ast.expr, depth: int) -> bool:
        if depth == 0:
            return False
        if any(
            isinstance(each, ast.Call) and _last(each.func) in _TESTS_OF_FINITENESS for each in ast.walk(test)
        ):
            return True
        plain = test.operand if isinstance(test, ast.UnaryOp) else test
        values = self.bindings.values(plain) if isinstance(plain, ast.Name) else []
        return any(self._asks_finite(value, depth - 1) for value in values)

    def _is_shared(self, node: ast.AST, depth: int) -> bool:
        """Return whether all ranks have the same value: a collective gave the value, or may have written it."""
        if depth == 0:
            return False
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and self._spreads(each):
                return True
            name = written(each)
            if not name:
                continue
            if any(word in last_name(each).lower() for word in _AGREED_WORDS):
                return True
            calls = self.bindings.script.calls(self.bindings.script.scope_of(each))
            if any(name in map(written, call.args) and self._spreads(call) for call in calls):
                return True
            values = self.bindings.values(each, with_members=True)
            if any(self._is_shared(value, depth - 1) for value in values):
                return True
        return False

    def _spreads(self, call: ast.Call) -> bool:
        """Return whether a call returns the same value on all ranks."""
        found = self.collectives.of(call)
        return found is not None and found.key not in ("backward", "prepare") and not found.trains

    def _join(self, parts: Iterable[ast.expr], depth: int) -> RankSubset | None:
        found = {self.ranks(each, depth) for each in parts} - {None}
        return found.pop() if len(found) == 1 else RankSubset.SOME if found else None

    def _first(self, values: Iterable[ast.expr], depth: int) -> RankSubset | None:
        """Return the ranks of the first value that depends on the rank."""
        return next((found for each in values if (found := self.ranks(each, depth - 1))), None)

    def _judge_call(self, call: ast.Call, depth: int) -> RankSubset | None:
        name = last_name(call.func)
        function = self.bindings.script.callee(call)
        if function is not None:
            return self._first(_find_returned(function), depth)
        if name in _FLAGS:
            return RankSubset.MAIN
        if name == "getattr" and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
            return RankSubset.MAIN if call.args[1].value in _FLAGS else None
        if name in ("bool", "any", "all") and call.args:
            return self.ranks(call.args[0], depth)
        return RankSubset.OTHERS if self._is_numeric_call(call, depth) else None

    def _is_numeric_call(self, call: ast.Call, depth: int) -> bool:
        name = last_name(call.func)
        if name in _NUMBER_CALLS:
            return True
        if name in _CONVERSIONS and call.args:
            return self.is_number(call.args[0], depth)
        if name in ("get", "getenv") and call.args and _is_variable(call.args[0]):
            return name == "getenv" or _is_environ(getattr(call.func, "value", call))
        function = self.bindings.script.callee(call)
        return function is not None and any(
            self.is_number(each, depth - 1) for each in _find_returned(function)
        )

    def _compare(self, test: ast.Compare, depth: int) -> RankSubset | None:
        """Return the ranks on which a comparison is true; None for tests of whether ranks exist at all."""
        sides = [test.left, *test.comparators]
        if len(sides) == 2 and self.is_number(sides[1], depth) and not self.is_number(sides[0], depth):
            sides.reverse()
        is_flag = [
            isinstance(each, ast.Name | ast.Attribute | ast.Call)
            and self.ranks(each, depth - 1) is RankSubset.MAIN
            for each in sides
        ]
        if not any(is_flag) and not any(self.is_number(each, depth) for each in sides):
            return None
        if len(sides) != 2:
            return RankSubset.SOME
        operation = test.ops[0]
        value: object = sides[1]  # no number, unless the source tells
        with suppress(ValueError):
            value = ast.literal_eval(sides[1])
        values: list[object] = list(value) if isinstance(value, tuple | list | set) else [value]
        if is_flag[0]:
            is_main = values == [True] or not isinstance(operation, ast.Eq | ast.Is)
            return RankSubset.MAIN if is_main else RankSubset.SOME
        if all(value in (-1, None, "-1", "") for value in values):
            return None
        if not all(str(value) in ("0", "-1") for value in values):
            return RankSubset.SOME
        match operation:
            case ast.Eq() | ast.Is() | ast.In() | ast.LtE():
                return RankSubset.MAIN
            case ast.NotEq() | ast.IsNot() | ast.NotIn() | ast.Gt():
                return RankSubset.OTHERS
            case _:  # `local_rank >= 0` asks whether there are several processes
                return None

    def _is_agreed(self, node: ast.expr) -> bool:
        """Return whether the ranks have agreed on a name's value by a collective."""
        values = self.bindings.values(node, with_members=True)
        return any(self.collectives.within(value) for value in values if not isinstance(value, ast.Constant))


def _last(node: ast.expr) -> str:
    """Return the name in a name expression or attribute expression."""
    return node.attr if isinstance(node, ast.Attribute) else written(node)


def _find_returned(function: Function) -> Iterator[ast.expr]:
    for node in own_nodes(function.body):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def _is_environ(node: ast.AST) -> bool:
    return last_name(node) in ("environ", "env", "environment")


def _is_variable(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in _VARIABLES
