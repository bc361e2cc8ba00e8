"""Learning rate schedules that advance too often: DT305 and DT306."""

import ast
import re
from collections.abc import Iterator

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.program import Program
from drivetrain_lint.reading.imports import written
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.training_loop import (
    blocks,
    conditions_around,
    loops_around,
    own_calls,
    scopes,
    straight_line,
)

_LENGTHS = frozenset({"num_training_steps", "total_steps", "total_iters", "T_max", "t_total"})


def _stepped_twice(program: Program) -> Iterator[Hit]:
    for scope in scopes(program):
        steps = [call for call in own_calls(program.script, scope) if _is_schedule_step(program, call)]
        told: set[ast.AST] = set()
        for block in blocks(program.script, scope):
            yield from _twice_in(program, block, told)
        yield from _per_batch_and_epoch(program, [each for each in steps if each not in told])
        yield from _by_hand(program, steps)


def _twice_in(program: Program, block: list[ast.stmt], told: set[ast.AST]) -> Iterator[Hit]:
    """Find two steps of one schedule among statements that run one after the other, in a loop."""
    first: dict[str, ast.Call] = {}
    for statement in straight_line(block):
        if isinstance(statement, ast.For | ast.While | ast.If | ast.Try):
            first = {}  # what runs between may be an optimizer step of its own
            continue
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call):
            continue
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "step"
            and not _is_schedule_step(program, call)
        ):
            first = {}
        if not _is_schedule_step(program, call) or not loops_around(program.script, call):
            continue
        name = written(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if name in first:
            told.add(call)
            yield Hit(
                node=call,
                what=f"`{name}.step()` is called a second time in a round of the loop, after line "
                f"{first[name].lineno}",
            )
        first[name] = call


def _per_batch_and_epoch(program: Program, steps: list[ast.Call]) -> Iterator[Hit]:
    """Find a schedule that steps in an inner loop and once more in the loop around it."""
    script = program.script
    for outer in steps:
        around = loops_around(script, outer)
        if not around or conditions_around(script, outer, until=around[0]) or outer.args:
            continue
        for inner in steps:
            loops = loops_around(script, inner)
            same = (
                ast.unparse(inner.func) == ast.unparse(outer.func) and inner is not outer and not inner.args
            )
            deeper = len(loops) > len(around) and loops[-len(around) :] == around
            if same and deeper and not conditions_around(script, inner, until=around[0]):
                yield Hit(
                    node=outer,
                    what=f"`{ast.unparse(outer.func)}()` steps once an epoch, and at line "
                    f"{inner.lineno} once a batch too",
                )
                break


def _by_hand(program: Program, steps: list[ast.Call]) -> Iterator[Hit]:
    """Find a prepared schedule that a loop over the processes or accumulation steps advances."""
    known = program.prepared
    for call in steps:
        loops = loops_around(program.script, call)
        if not loops or not isinstance(loops[0], ast.For) or not isinstance(call.func, ast.Attribute):
            continue
        count = ast.unparse(loops[0].iter)
        if len(loops[0].body) != 1 or written(call.func.value) not in known.results:
            continue
        if re.search(r"^range\(.*(num_processes|world_size|accum)", count):
            name = written(call.func)
            yield Hit(
                node=call, what=f"`{name}()` is repeated over `{count}`, though the schedule is prepared"
            )


def _is_schedule_step(program: Program, call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "step") or len(call.args) > 1:
        return False
    owner = call.func.value
    last = written(owner).rpartition(".")[2].lower()
    made = [
        program.script.name_of(each.func)
        for each in program.bindings.values(owner)
        if isinstance(each, ast.Call)
    ]
    if any(name.startswith("torch.optim.lr_scheduler.") for name in made):
        return True
    words = ("noise", "ema", "diff", "weight", "temp", "wd_", "beta", "timestep", "momentum")
    return "sched" in last and not any(word in last for word in words)


def _scaled_length(program: Program) -> Iterator[Hit]:
    script = program.script
    if not any(name.partition(".")[0] == "drivetrain" for name in script.imports.values()):
        return
    for call in script.calls():
        for keyword in call.keywords:
            if keyword.arg not in _LENGTHS:
                continue
            for node in ast.walk(keyword.value):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.FloorDiv | ast.Div):
                    sides = [written(node.left).rpartition(".")[2], written(node.right).rpartition(".")[2]]
                    if "num_processes" in sides or "world_size" in sides:
                        yield Hit(
                            node=keyword.value,
                            what=f"`{keyword.arg}={ast.unparse(keyword.value)}` scales the length "
                            "of a schedule by ranks",
                        )
                        break


RULES = (
    Rule(
        code="DT305",
        name="schedule-stepped-twice",
        severity=Severity.ERROR,
        summary="A learning rate schedule steps several times for one optimizer step.",
        why="The schedule ends early: the rest of the run trains at its last rate, often 0.",
        mend="Step it once, after optimizer.step() or once an epoch; a prepared schedule counts "
        "optimizer steps by itself.",
        check=_stepped_twice,
    ),
    Rule(
        code="DT306",
        name="schedule-length-by-ranks",
        severity=Severity.WARNING,
        summary="The length of a schedule is multiplied or divided by the number of processes (drivetrain only).",
        why="drivetrain's schedules count optimizer steps, as many on any number of processes.",
        mend="Say total_steps=accelerator.num_steps(loader, epochs=...), with the prepared loader.",
        check=_scaled_length,
    ),
)
