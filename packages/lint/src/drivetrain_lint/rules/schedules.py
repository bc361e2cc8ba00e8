"""Learning rate schedules that advance too often: DT305 and DT306."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.reading.imports import last_name, written
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.visitor import VisitedCall, VisitedScope

_LENGTHS = frozenset({"num_training_steps", "total_steps", "total_iters", "T_max", "t_total"})
_RANK_COUNTS = frozenset({"num_processes", "world_size"})


@partial(
    Rule,
    code="DT305",
    name="schedule-stepped-twice",
    severity=Severity.ERROR,
    why="The schedule ends early: the rest of the run trains at its last rate, often 0.",
    repair="Step it once, after optimizer.step() or once an epoch; a prepared schedule counts optimizer steps by "
    "itself.",
    visits=lambda visitor: visitor.scopes,
)
def check_steps(scope: VisitedScope) -> Iterator[Hit]:
    """A learning rate schedule steps several times for one optimizer step."""
    steps = {call.node: call for call in scope.calls if call.is_schedule_step}
    repeated = {
        second: first
        for statements in scope.sequences()
        for first, second in _find_repeated(statements, steps)
    }
    for second, first in repeated.items():
        name = written(steps[second].owner)
        what = f"`{name}.step()` is called a second time in a round of the loop, after line {first.lineno}"
        yield Hit(second, what)
    others = [call for node, call in steps.items() if node not in repeated and not node.args and call.loops]
    for outer in others:
        around, name = outer.loops, ast.unparse(outer.node.func)
        inner = next(
            (
                each
                for each in others
                if ast.unparse(each.node.func) == name
                and len(each.loops) > len(around)
                and each.loops[-len(around) :] == around
                and not outer.conditions(until=around[0])
                and not each.conditions(until=around[0])
            ),
            None,
        )
        if inner is not None:
            what = (
                f"`{ast.unparse(outer.node.func)}()` steps once an epoch, and at line "
                f"{inner.node.lineno} once a batch too"
            )
            yield Hit(outer.node, what)
    for call in steps.values():
        loop = call.loops[0] if call.loops else None
        if not isinstance(loop, ast.For) or len(loop.body) != 1:
            continue
        count = ast.unparse(loop.iter)
        is_prepared = written(call.owner) in call.program.prepared.results
        if is_prepared and re.search(r"^range\(.*(num_processes|world_size|accum)", count):
            what = f"`{call.written}()` is repeated over `{count}`, though the schedule is prepared"
            yield Hit(call.node, what)


def _find_repeated(
    statements: Sequence[ast.stmt], steps: Mapping[ast.Call, VisitedCall]
) -> Iterator[tuple[ast.Call, ast.Call]]:
    """Iterate over pairs of steps of the same schedule among statements that run in sequence in a loop."""
    first: dict[str, ast.Call] = {}
    for statement in statements:
        if isinstance(statement, ast.For | ast.While | ast.If | ast.Try):
            first = {}  # what runs between may be an optimizer step of its own
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call):
            continue
        if call not in steps:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "step":
                first = {}
        elif steps[call].loops:
            name = written(steps[call].owner)
            if name in first:
                yield first[name], call
            first[name] = call


@partial(
    Rule,
    code="DT306",
    name="schedule-length-by-ranks",
    severity=Severity.WARNING,
    why="drivetrain's schedules count optimizer steps, as many on any number of processes.",
    repair="Say total_steps=accelerator.num_steps(loader, epochs=...), with the prepared loader.",
    visits=lambda visitor: visitor.calls,
)
def check_length(call: VisitedCall) -> Iterator[Hit]:
    """The length of a schedule is multiplied or divided by the number of processes (drivetrain only)."""
    script = call.program.script
    for keyword in call.node.keywords:
        scales = keyword.arg in _LENGTHS and any(
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Mult | ast.FloorDiv | ast.Div)
            and not _RANK_COUNTS.isdisjoint((last_name(node.left), last_name(node.right)))
            for node in ast.walk(keyword.value)
        )
        if scales and any(name.partition(".")[0] == "drivetrain" for name in script.imports.values()):
            what = f"`{keyword.arg}={ast.unparse(keyword.value)}` scales the length of a schedule by ranks"
            yield Hit(keyword.value, what)


RULES = (check_steps, check_length)
