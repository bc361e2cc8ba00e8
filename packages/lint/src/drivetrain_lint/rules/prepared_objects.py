"""Objects that are used unprepared in spite of `prepare`: DT201 to DT204."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.bindings import Binding
from drivetrain_lint.flow.preparations import Preparation
from drivetrain_lint.flow.program import Program
from drivetrain_lint.reading.imports import last_name, written
from drivetrain_lint.reading.script import Loop, own_nodes
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.visitor import VisitedCall, VisitedScope, calls_in

_LOADERS = frozenset({"DataLoader", "StatefulDataLoader"})
_READERS = frozenset({"enumerate", "tqdm", "iter", "track", "islice"})
_WRAPPER_TESTS = ("module", "isinstance", "Parallel", "ddp", "distributed", "multi")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A use of an object in a training loop: the expression and the kind of use."""

    name: str
    node: ast.expr
    how: str


@partial(
    Rule,
    code="DT201",
    name="unprepared-object",
    severity=Severity.ERROR,
    why="Each rank reads all of an unprepared loader; an unprepared model's gradients are not averaged; an "
    "unprepared optimizer steps inside open accumulation windows.",
    repair="Pass it to accelerator.prepare with the others, and use what prepare returns.",
    visits=lambda visitor: visitor.scopes,
)
def check_uses(scope: VisitedScope) -> Iterator[Hit]:
    """A training loop uses a model, an optimizer or a loader that did not go through prepare()."""
    program = scope.program
    mine = [each for each in program.preparations if each.scope is scope.node]
    known = program.prepared.arguments | program.prepared.results
    for use in _find_uses(scope) if program.preparations else ():
        bound = program.bindings.in_scope(scope.node, use.name)
        renamed = _find_renaming(mine, use)
        if renamed is not None and not any(
            renamed.node.lineno < each.line <= use.node.lineno for each in bound
        ):
            prepared = renamed.results[renamed.arguments.index(use.name)] or "another name"
            yield Hit(
                use.node,
                f"`{use.name}` is {use.how}, but `prepare` (line {renamed.node.lineno}) put the "
                f"prepared one into `{prepared}`",
                repair=f"Use `{prepared}`, or assign the prepared object to `{use.name}`.",
            )
        elif mine and use.name not in known and _is_own(scope, use, bound):
            others = ", ".join(f"`{name}`" for name in mine[0].arguments[:2] if name)
            yield Hit(
                use.node,
                f"`{use.name}` is {use.how}, but only {others or 'others'} went through "
                f"`prepare` (line {mine[0].node.lineno})",
            )


def _find_uses(scope: VisitedScope) -> Iterator[_Use]:
    """Iterate over the uses of loaders, optimizers and models in loops that train or evaluate."""
    program = scope.program
    training: set[Loop] = set()
    for loop in scope.nodes:
        if not isinstance(loop, Loop):
            continue
        calls = list(calls_in(program, loop))
        if any(call.is_backward for call in calls):
            training.add(loop)
        keys = {found.key for call in calls if (found := program.collectives.of(call.node))}
        if isinstance(loop, ast.For) and (loop in training or "gather_for_metrics" in keys):
            read = loop.iter
            while isinstance(read, ast.Call) and last_name(read.func) in _READERS and read.args:
                read = read.args[0]
            if name := written(read):
                yield _Use(name=name, node=loop.iter, how="iterated over")
    for call in scope.calls:
        if training.isdisjoint(call.loops):
            continue
        name = written(call.owner)
        if call.is_optimizer_step and name:
            yield _Use(name=name, node=call.node, how="stepped")
        elif not call.method and name and name not in {*program.script.imports, *program.script.functions}:
            yield _Use(name=name, node=call.node, how="called")


def _find_renaming(preparations: list[Preparation], use: _Use) -> Preparation | None:
    """Return the earlier preparation that took the used object and gave the result another name."""
    for each in reversed([each for each in preparations if each.node.lineno < use.node.lineno]):
        if use.name in each.results:
            return None
        if use.name in each.arguments and len(each.results) == len(each.arguments):
            return each
    return None


def _is_own(scope: VisitedScope, use: _Use, bound: Sequence[Binding]) -> bool:
    """Return whether the script itself made the object and passed it to no code that may prepare it."""
    program = scope.program
    if (
        not bound
        or use.name in program.prepared.handed_on
        or any(each.position is not None for each in bound)
    ):
        return False
    makers = [program.script.name_of(each.value.func) for each in bound if isinstance(each.value, ast.Call)]
    if len(makers) < len(bound):
        return False
    if use.how == "iterated over":
        return all(each.rpartition(".")[2] in _LOADERS for each in makers)
    if use.how == "stepped":
        return all(each.startswith("torch.optim.") for each in makers)
    # A model is to be prepared if an optimizer over its parameters is.
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "parameters"
        and written(call.func.value) == use.name
        for name, values in program.bindings.by_scope.get(scope.node, {}).items()
        if name in program.prepared.arguments
        for each in values
        if isinstance(each.value, ast.Call)
        and program.script.name_of(each.value.func).startswith("torch.optim.")
        for call in program.script.calls(each.value)
    )


@partial(
    Rule,
    code="DT202",
    name="prepared-result-dropped",
    severity=Severity.ERROR,
    why="prepare returns new objects: the ones in use are not sharded, wrapped or placed on the device.",
    repair="Assign the result to the same names.",
    visits=lambda visitor: visitor.calls,
)
def check_result(call: VisitedCall) -> Iterator[Hit]:
    """The result of prepare() is not assigned."""
    script, node = call.program.script, call.node
    if call.method != "prepare" or not script.is_accelerator(call.owner):
        return
    names = {written(each) for each in node.args} - {""}
    goes_on = any(
        getattr(each, "lineno", 0) > (node.end_lineno or node.lineno) and written(each) in names
        for each in own_nodes(ast.iter_child_nodes(script.scope_of(node)))
    )
    if goes_on and isinstance(script.parents.get(node), ast.Expr):
        shown = ", ".join(ast.unparse(each) for each in node.args)
        yield Hit(
            node,
            f"the result of `{call.written}` is dropped; the loop goes on with the objects as they were",
            repair=f"Assign it: {shown} = {call.written}({shown})",
        )


@partial(
    Rule,
    code="DT203",
    name="prepared-in-another-order",
    severity=Severity.ERROR,
    why="prepare returns the objects in the order given: the names hold each other's objects.",
    repair="Use the same order on both sides.",
    visits=lambda visitor: visitor.program.preparations,
)
def check_order(preparation: Preparation) -> Iterator[Hit]:
    """The names that take the result of prepare() are not in the order of its arguments."""
    arguments, results = preparation.arguments, preparation.results
    if not preparation.is_unpacked or "" in arguments:
        return
    if len(results) != len(arguments):
        what = f"{len(arguments)} objects go into `prepare`, and {len(results)} names take them"
        yield Hit(preparation.node, what)
    elif results != arguments and sorted(results) == sorted(arguments):
        given, taken = ", ".join(arguments), ", ".join(results)
        what = f"`prepare({given})` is assigned to `{taken}`, in another order"
        yield Hit(preparation.node, what)


@partial(
    Rule,
    code="DT204",
    name="wrapper-attribute",
    severity=Severity.WARNING,
    why="On one process there is no wrapper, and FSDP2 has none either: the script fails there.",
    repair="Write accelerator.unwrap_model(model).",
    visits=lambda visitor: (visitor.program,),
)
def check_wrapper(program: Program) -> Iterator[Hit]:
    """`.module` is read from a prepared model."""
    script = program.script
    for node in script.nodes if script.uses_accelerator else ():
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "module"
            and isinstance(node.ctx, ast.Load)
            and written(node.value) in program.prepared.results
            # A test around the access asks for the wrapper first, or an unwrapping loop does.
            and not any(
                isinstance(each, ast.Try)
                or (
                    isinstance(each, ast.If | ast.IfExp | ast.While)
                    and any(word in ast.unparse(each.test) for word in _WRAPPER_TESTS)
                )
                for each in script.enclosing(node)
            )
        ):
            name = written(node.value)
            yield Hit(
                node,
                f"`{name}.module` exists only while DDP wraps the model",
                repair=f"Write accelerator.unwrap_model({name}), which is right on one process and "
                "under every backend.",
            )


RULES = (check_uses, check_result, check_order, check_wrapper)
