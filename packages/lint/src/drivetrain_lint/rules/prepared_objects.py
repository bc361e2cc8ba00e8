"""Objects used as they were before `prepare`: DT201 to DT204."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.preparations import Preparation
from drivetrain_lint.flow.program import Program
from drivetrain_lint.reading.imports import written
from drivetrain_lint.reading.script import Scope
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.training_loop import (
    Loop,
    is_backward,
    is_optimizer,
    last_name,
    loops_around,
    own_calls,
    scopes,
)

_LOADERS = frozenset({"DataLoader", "StatefulDataLoader"})
_READERS = frozenset({"enumerate", "tqdm", "iter", "track", "islice"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A use of an object in a training loop."""

    name: str
    node: ast.AST
    how: str

    @property
    def place(self) -> ast.AST:
        """The expression that uses it."""
        return self.node.iter if isinstance(self.node, ast.For) else self.node


def _raw_objects(program: Program) -> Iterator[Hit]:
    if not program.preparations:
        return
    known = program.prepared
    everywhere = known.arguments | known.results
    for scope in scopes(program):
        mine = [each for each in program.preparations if each.scope is scope]
        for use in _uses(program, scope):
            line = getattr(use.node, "lineno", 0)
            renamed = _renamed(mine, use.name, line)
            if renamed is not None and not _bound_between(program, use, renamed.line):
                kept = renamed.results[renamed.arguments.index(use.name)] or "another name"
                yield Hit(
                    node=use.place,
                    what=f"`{use.name}` is {use.how}, but `prepare` (line {renamed.line}) put the "
                    f"prepared one into `{kept}`",
                    mend=f"Use `{kept}`, or assign the prepared object to `{use.name}`.",
                )
            elif mine and use.name not in everywhere and _is_own(program, use, known.handed_on):
                others = ", ".join(f"`{name}`" for name in mine[0].arguments[:2] if name)
                yield Hit(
                    node=use.place,
                    what=f"`{use.name}` is {use.how}, but only {others or 'others'} went through "
                    f"`prepare` (line {mine[0].line})",
                )


def _uses(program: Program, scope: Scope) -> Iterator[_Use]:
    """Iterate over loaders read, optimizers stepped and models called in loops that train or evaluate."""
    script = program.script
    training = {
        loop: any(is_backward(script, call) for call in own_calls(script, loop))
        for loop in script.own_nodes(scope)
        if isinstance(loop, Loop)
    }
    for loop, trains in training.items():
        name = _read(loop.iter) if isinstance(loop, ast.For) else ""
        if name and (trains or any(_evaluates(program, call) for call in own_calls(script, loop))):
            yield _Use(name=name, node=loop, how="iterated over")
    for node in own_calls(script, scope) if any(training.values()) else ():
        if not any(training.get(loop) for loop in loops_around(script, node)):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            name = written(node.func.value)
            if name and is_optimizer(name, node.func.value, program.bindings):
                yield _Use(name=name, node=node, how="stepped")
        elif (
            isinstance(node.func, ast.Name)
            and node.func.id not in script.imports
            and node.func.id not in script.functions
        ):
            yield _Use(name=node.func.id, node=node, how="called")


def _renamed(mine: list[Preparation], name: str, line: int) -> Preparation | None:
    """Return the preparation before a line that took a name and gave its result another one."""
    for each in reversed([each for each in mine if each.line < line]):
        if name in each.results:
            return None
        if name in each.arguments and len(each.results) == len(each.arguments):
            return each
    return None


def _bound_between(program: Program, use: _Use, line: int) -> bool:
    """Return whether a name was bound again after a preparation and before its use."""
    end = getattr(use.node, "lineno", 0)
    scope = program.script.scope_of(use.node)
    bound = program.bindings.by_scope.get(scope, {}).get(use.name, ())
    return any(line < getattr(each.node, "lineno", 0) <= end for each in bound)


def _is_own(program: Program, use: _Use, handed_on: frozenset[str]) -> bool:
    """Return whether the script itself made the object and handed it to nothing that may prepare it."""
    scope = program.script.scope_of(use.node)
    bound = program.bindings.by_scope.get(scope, {}).get(use.name, ())
    if not bound or use.name in handed_on or any(each.position is not None for each in bound):
        return False
    made = [each.value for each in bound]
    if any(not isinstance(each, ast.Call) for each in made):
        return False
    makers = [program.script.name_of(each.func) for each in made if isinstance(each, ast.Call)]
    if use.how == "iterated over":
        return all(each.rpartition(".")[2] in _LOADERS for each in makers)
    if use.how == "stepped":
        return all(each.startswith("torch.optim.") for each in makers)
    return _optimizer_is_prepared(program, scope, use.name)


def _optimizer_is_prepared(program: Program, scope: Scope, model: str) -> bool:
    """Return whether an optimizer over a model's parameters went through `prepare` without the model."""
    known = program.prepared
    for name, bound in program.bindings.by_scope.get(scope, {}).items():
        if name not in known.arguments:
            continue
        for each in bound:
            if isinstance(each.value, ast.Call) and program.script.name_of(each.value.func).startswith(
                "torch.optim."
            ):
                owners = [
                    written(call.func.value)
                    for call in program.script.calls(each.value)
                    if isinstance(call.func, ast.Attribute) and call.func.attr == "parameters"
                ]
                if model in owners:
                    return True
    return False


def _read(iterated: ast.expr) -> str:
    while isinstance(iterated, ast.Call) and last_name(iterated.func) in _READERS and iterated.args:
        iterated = iterated.args[0]
    return written(iterated)


def _evaluates(program: Program, call: ast.Call) -> bool:
    found = program.collectives.of(call)
    return found is not None and found.key == "gather_for_metrics"


def _dropped(program: Program) -> Iterator[Hit]:
    for call in program.script.method_calls("prepare"):
        if isinstance(program.script.parents.get(call), ast.Expr) and _used_later(program, call):
            shown = ", ".join(ast.unparse(each) for each in call.args)
            yield Hit(
                node=call,
                what=f"the result of `{written(call.func)}` is dropped; the loop goes on with the "
                "objects as they were",
                mend=f"Assign it: {shown} = {written(call.func)}({shown})",
            )


def _used_later(program: Program, call: ast.Call) -> bool:
    """Return whether the script goes on with an object that it handed to `prepare`."""
    names = {written(each) for each in call.args} - {""}
    end = call.end_lineno or call.lineno
    return any(
        isinstance(node, ast.Name | ast.Attribute) and node.lineno > end and written(node) in names
        for node in program.script.own_nodes(program.script.scope_of(call))
    )


def _order(program: Program) -> Iterator[Hit]:
    for each in program.preparations:
        if not each.is_unpacked or "" in each.arguments:
            continue
        if len(each.results) != len(each.arguments):
            what = f"{len(each.arguments)} objects go into `prepare`, and {len(each.results)} names take them"
            yield Hit(node=each.node, what=what)
        elif each.results != each.arguments and sorted(each.results) == sorted(each.arguments):
            given, taken = ", ".join(each.arguments), ", ".join(each.results)
            what = f"`prepare({given})` is assigned to `{taken}`, in another order"
            yield Hit(node=each.node, what=what)


def _module(program: Program) -> Iterator[Hit]:
    if not program.script.uses_accelerator:
        return
    known = program.prepared.results
    for node in program.script.nodes:
        if not (isinstance(node, ast.Attribute) and node.attr == "module" and written(node.value) in known):
            continue
        if isinstance(node.ctx, ast.Load) and not _asked(program, node):
            name = written(node.value)
            yield Hit(
                node=node,
                what=f"`{name}.module` exists only while DDP wraps the model",
                mend=f"Write accelerator.unwrap_model({name}), which is right on one process and "
                "under every backend.",
            )


def _asked(program: Program, node: ast.Attribute) -> bool:
    """Return whether a test around an access asks for the wrapper first, or an unwrapping loop does."""
    for each in program.script.enclosing(node):
        if isinstance(each, ast.If | ast.IfExp | ast.While):
            test = ast.unparse(each.test)
            if any(
                word in test for word in ("module", "isinstance", "Parallel", "ddp", "distributed", "multi")
            ):
                return True
        if isinstance(each, ast.Try):
            return True
    return False


RULES = (
    Rule(
        code="DT201",
        name="unprepared-object",
        severity=Severity.ERROR,
        summary="A training loop uses a model, an optimizer or a loader that did not go through prepare().",
        why="Each rank reads all of an unprepared loader; an unprepared model's gradients are not averaged; an "
        "unprepared optimizer steps inside open accumulation windows.",
        mend="Pass it to accelerator.prepare with the others, and use what prepare returns.",
        check=_raw_objects,
    ),
    Rule(
        code="DT202",
        name="prepared-result-dropped",
        severity=Severity.ERROR,
        summary="The result of prepare() is not assigned.",
        why="prepare returns new objects: the ones in use are not sharded, wrapped or placed on the device.",
        mend="Assign the result to the same names.",
        check=_dropped,
    ),
    Rule(
        code="DT203",
        name="prepared-in-another-order",
        severity=Severity.ERROR,
        summary="The names that take the result of prepare() are not in the order of its arguments.",
        why="prepare returns the objects in the order given: the names hold each other's objects.",
        mend="Use the same order on both sides.",
        check=_order,
    ),
    Rule(
        code="DT204",
        name="wrapper-attribute",
        severity=Severity.WARNING,
        summary="`.module` is read from a prepared model.",
        why="On one process there is no wrapper, and FSDP2 has none either: the script fails there.",
        mend="Write accelerator.unwrap_model(model).",
        check=_module,
    ),
)
