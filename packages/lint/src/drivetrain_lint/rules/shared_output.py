"""Work that all ranks do and only one should, such as writing a file or asking; and an order that never changes."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.program import ONE_RANK, Program
from drivetrain_lint.flow.rank_tests import RANK_WORDS
from drivetrain_lint.reading.imports import last_name, written
from drivetrain_lint.reading.script import Function, own_nodes
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.visitor import VisitedCall, VisitedScope, Visitor

_DEPTH = 3


def _visit_calls_on_all_ranks(name: str) -> Callable[[Visitor], Iterator[VisitedCall]]:
    """Return a visit of the calls of a function that, as far as known, all ranks make."""

    def visit(visitor: Visitor) -> Iterator[VisitedCall]:
        for scope in visitor.scopes:
            calls = [call for call in scope.calls if call.name == name and not _is_on_one_rank(call)]
            # A function that trains runs on all ranks; of another one it is not known who calls it.
            if calls and any(scope.program.collectives.of(each.node) for each in scope.calls):
                yield from calls

    return visit


@partial(
    Rule,
    code="DT501",
    name="one-file-of-all-ranks",
    severity=Severity.WARNING,
    why="Ranks write over each other: the file may be torn, or hold another rank's values.",
    repair="Save on one rank (if accelerator.is_main_process: ...), or put the rank into the name; save_state and "
    "save_model do it for all.",
    visits=_visit_calls_on_all_ranks("torch.save"),
)
def check_file(save: VisitedCall) -> Iterator[Hit]:
    """torch.save writes to one path on all ranks."""
    path = save.node.args[1] if len(save.node.args) > 1 else None
    if path is not None and not _differs(save.program, path, _DEPTH) and _is_path(save.program, path, _DEPTH):
        yield Hit(save.node, f"all ranks write `{ast.unparse(path)}` at the same time")


@partial(
    Rule,
    code="DT503",
    name="question-on-all-ranks",
    severity=Severity.WARNING,
    why="A launched rank reads no keyboard: the call fails at the end of the file, or waits forever.",
    repair="Take the answer as an argument of the script.",
    visits=_visit_calls_on_all_ranks("input"),
)
def check_question(call: VisitedCall) -> Iterator[Hit]:
    """input() in a function that trains."""
    script = call.program.script
    is_builtin = "input" not in script.functions and not call.program.bindings.of(call.node.func)
    if is_builtin and script.is_distributed:
        what = "`input()` waits for a line on every rank, and ranks have no keyboard"
        yield Hit(call.node, what)


@partial(
    Rule,
    code="DT504",
    name="order-never-changes",
    severity=Severity.WARNING,
    why="Every epoch reads the samples in the order of the first one.",
    repair="Call sampler.set_epoch(epoch) at the start of each epoch; a loader that is prepared does it by "
    "itself.",
    visits=lambda visitor: visitor.scopes,
)
def check_sampler(scope: VisitedScope) -> Iterator[Hit]:
    """A DistributedSampler without set_epoch in a loop over epochs."""
    samplers = [
        call.node
        for call in scope.calls
        if call.last == "DistributedSampler"
        and all(each.arg != "shuffle" or ast.unparse(each.value) == "True" for each in call.node.keywords)
    ]
    epochs = [
        loop
        for loop in scope.nodes
        if isinstance(loop, ast.For)
        and "epoch" in ast.unparse(loop.target).lower()
        and _reads_attribute("backward", ast.walk(loop))
    ]
    if samplers and epochs and not _reads_attribute("set_epoch", scope.program.script.nodes):
        line = epochs[0].lineno
        what = f"the loop over epochs (line {line}) never calls `set_epoch` of this DistributedSampler"
        yield Hit(samplers[0], what)


def _reads_attribute(name: str, nodes: Iterable[ast.AST]) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes)


def _is_on_one_rank(call: VisitedCall) -> bool:
    """Return whether a test of the rank, an earlier return, or a decorator chooses the ranks of a call."""
    tests = call.program.tests
    for each in call.program.script.enclosing(call.node):
        if isinstance(each, ast.If | ast.While | ast.IfExp) and tests.ranks(each.test):
            return True
        if isinstance(each, ast.BoolOp) and tests.ranks(each):
            return True
        if isinstance(each, Function):
            decorators = " ".join(map(ast.unparse, each.decorator_list))
            if any(name in decorators for name in ONE_RANK):
                return True
            return any(
                isinstance(node, ast.If)
                and node.lineno < call.node.lineno
                and tests.ranks(node.test) is not None
                and any(isinstance(inner, ast.Return | ast.Continue) for inner in node.body)
                for node in own_nodes(each.body)
            )
    return False


def _differs(program: Program, path: ast.expr, depth: int) -> bool:
    """Return whether a path contains the rank."""
    for node in ast.walk(path):
        last = last_name(node).lower()
        if last in RANK_WORDS or any(word in last for word in ("rank", "process_index", "proc_id", "device")):
            return True
        if isinstance(node, ast.Call) and program.tests.is_number(node):
            return True
        values = program.bindings.values(node) if depth else []
        if any(_differs(program, value, depth - 1) for value in values):
            return True
    return False


def _is_path(program: Program, path: ast.expr, depth: int) -> bool:
    """Return whether an expression is a path that the script itself spells out, and not a buffer."""
    match path:
        case ast.JoinedStr():
            return True
        case ast.Constant():
            return isinstance(path.value, str)
        case ast.BinOp():
            return _is_path(program, path.left, depth) or _is_path(program, path.right, depth)
        case ast.Call():
            return written(path.func).endswith(("join", "Path"))
        case _:
            values = program.bindings.values(path) if depth else []
            return bool(values) and all(_is_path(program, value, depth - 1) for value in values)


RULES = (check_file, check_question, check_sampler)
