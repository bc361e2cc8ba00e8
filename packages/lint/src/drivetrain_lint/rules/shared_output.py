"""The work that all ranks do and one should: writing one file, asking, printing; and an order that never changes."""

import ast
from collections.abc import Iterator

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.program import ONE_RANK, Program
from drivetrain_lint.flow.rank_tests import rank_words
from drivetrain_lint.reading.imports import written
from drivetrain_lint.reading.script import Function
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.training_loop import loops_around, own_calls, scopes

_DEPTH = 3


def _files(program: Program) -> Iterator[Hit]:
    for call in _calls_on_all_ranks(program, "torch.save"):
        if len(call.args) < 2 or _differs(program, call.args[1], _DEPTH):
            continue
        if _is_path(program, call.args[1], _DEPTH):
            yield Hit(node=call, what=f"all ranks write `{ast.unparse(call.args[1])}` at the same time")


def _questions(program: Program) -> Iterator[Hit]:
    script = program.script
    if not script.is_distributed or "input" in script.functions:
        return
    for call in _calls_on_all_ranks(program, "input"):
        if not program.bindings.of(call.func):
            yield Hit(node=call, what="`input()` waits for a line on every rank, and ranks have no keyboard")


def _prints(program: Program) -> Iterator[Hit]:
    for call in _calls_on_all_ranks(program, "print"):
        if loops_around(program.script, call):
            yield Hit(node=call, what="`print` in a training loop writes once for each rank")


def _calls_on_all_ranks(program: Program, name: str) -> Iterator[ast.Call]:
    """Iterate over the calls of a function that all ranks make, as far as it is known."""
    for scope in scopes(program):
        calls = list(own_calls(program.script, scope))
        # A function that trains runs on all ranks; of another one it is not known who calls it.
        if any(program.collectives.of(each) for each in calls):
            for call in calls:
                if program.script.name_of(call.func) == name and not _on_one_rank(program, call):
                    yield call


def _orders(program: Program) -> Iterator[Hit]:
    script = program.script
    if any(isinstance(node, ast.Attribute) and node.attr == "set_epoch" for node in script.nodes):
        return
    for scope in scopes(program):
        made = [
            call
            for call in own_calls(program.script, scope)
            if script.name_of(call.func).rpartition(".")[2] == "DistributedSampler"
            and all(each.arg != "shuffle" or ast.unparse(each.value) == "True" for each in call.keywords)
        ]
        epochs = [
            loop
            for loop in program.script.own_nodes(scope)
            if isinstance(loop, ast.For)
            and "epoch" in ast.unparse(loop.target).lower()
            and any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(loop))
        ]
        if made and epochs:
            yield Hit(
                node=made[0],
                what=f"the loop over epochs (line {epochs[0].lineno}) never calls `set_epoch` of "
                "this DistributedSampler",
            )


def _on_one_rank(program: Program, call: ast.Call) -> bool:
    """Return whether a test of the rank, an earlier return, or a decorator chooses the ranks of a call."""
    script = program.script
    for each in script.enclosing(call):
        if isinstance(each, ast.If | ast.While | ast.IfExp) and program.tests.ranks(each.test) is not None:
            return True
        if isinstance(each, ast.BoolOp) and program.tests.ranks(each) is not None:
            return True
        if isinstance(each, Function):
            decorators = " ".join(ast.unparse(decorator) for decorator in each.decorator_list)
            return any(name in decorators for name in ONE_RANK) or _left_before(program, each, call)
    return False


def _left_before(program: Program, function: Function, call: ast.Call) -> bool:
    return any(
        isinstance(node, ast.If)
        and node.lineno < call.lineno
        and program.tests.ranks(node.test) is not None
        and any(isinstance(each, ast.Return | ast.Continue) for each in node.body)
        for node in program.script.own_nodes(function)
    )


def _differs(program: Program, path: ast.expr, depth: int) -> bool:
    """Return whether a path contains the rank."""
    words = set(rank_words())
    for node in ast.walk(path):
        last = written(node).rpartition(".")[2].lower()
        if last and (
            any(word in last for word in ("rank", "process_index", "proc_id", "device")) or last in words
        ):
            return True
        if isinstance(node, ast.Call) and program.tests.is_number(node):
            return True
        values = program.bindings.values(node) if depth else []
        if any(_differs(program, value, depth - 1) for value in values):
            return True
    return False


def _is_path(program: Program, path: ast.expr, depth: int) -> bool:
    """Return whether an expression is a path that the script itself spells out, rather than a buffer."""
    if isinstance(path, ast.Constant | ast.JoinedStr):
        return isinstance(path, ast.JoinedStr) or isinstance(path.value, str)
    if isinstance(path, ast.BinOp):
        return _is_path(program, path.left, depth) or _is_path(program, path.right, depth)
    if isinstance(path, ast.Call):
        return written(path.func).endswith(("join", "Path"))
    values = program.bindings.values(path) if depth else []
    return bool(values) and all(_is_path(program, value, depth - 1) for value in values)


RULES = (
    Rule(
        code="DT501",
        name="one-file-of-all-ranks",
        severity=Severity.WARNING,
        summary="torch.save writes to one path on all ranks.",
        why="Ranks write over each other: the file may be torn, or hold another rank's values.",
        mend="Save on one rank (if accelerator.is_main_process: ...), or put the rank into the name; save_state and "
        "save_model do it for all.",
        check=_files,
    ),
    Rule(
        code="DT502",
        name="print-on-all-ranks",
        severity=Severity.INFO,
        summary="print() in a training loop, on all ranks.",
        why="Eight ranks write eight lines.",
        mend="Write accelerator.print(...), or test the rank.",
        check=_prints,
        is_default=False,
    ),
    Rule(
        code="DT503",
        name="question-on-all-ranks",
        severity=Severity.WARNING,
        summary="input() in a function that trains.",
        why="A launched rank reads no keyboard: the call fails at the end of the file, or waits forever.",
        mend="Take the answer as an argument of the script.",
        check=_questions,
    ),
    Rule(
        code="DT504",
        name="order-never-changes",
        severity=Severity.WARNING,
        summary="A DistributedSampler without set_epoch in a loop over epochs.",
        why="Every epoch reads the samples in the order of the first one.",
        mend="Call sampler.set_epoch(epoch) at the start of each epoch; a loader that is prepared does it by itself.",
        check=_orders,
    ),
)
