"""Backward and optimizer steps that bypass the Accelerator: DT301 to DT304."""

import ast
from collections.abc import Iterator
from functools import partial

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.reading.imports import last_name, word_set, written
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.visitor import VisitedCall, VisitedScope, calls_in, is_optimizer

# Objects other than a loss that have a `backward` of their own.
_ENGINES = tuple(word_set("accelerator engine fabric manager optimizer opt strategy self ctx booster"))
_DEPTH = 3
_GRADIENT_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


@partial(
    Rule,
    code="DT301",
    name="backward-past-accelerator",
    severity=Severity.ERROR,
    why="The loss is neither divided by the accumulation steps nor scaled for fp16; drivetrain refuses the next "
    "step.",
    repair="Write accelerator.backward(loss).",
    visits=lambda visitor: visitor.calls,
)
def check_backward(call: VisitedCall) -> Iterator[Hit]:
    """loss.backward() in a script whose model is prepared."""
    owner = call.owner
    # An engine's backward takes the loss as an argument.
    if (
        call.method != "backward"
        or call.node.args
        or call.program.script.is_accelerator(owner)
        or last_name(owner).lower().endswith(_ENGINES)
        or written(owner).startswith("torch.")
        or call.is_chosen_against("backward")
        or not _is_of_prepared(call, owner, _DEPTH)
    ):
        return
    loss = owner
    if isinstance(owner, ast.Call) and last_name(owner.func) in ("scale", "scale_loss") and owner.args:
        loss = owner.args[0]
    what = f"`{ast.unparse(call.node.func)}()` goes past the Accelerator"
    yield Hit(call.node, what, repair=f"Write accelerator.backward({ast.unparse(loss)}).")


def _is_of_prepared(call: VisitedCall, value: ast.expr, depth: int) -> bool:
    """Return whether names show that a loss is computed from an earlier result of `prepare`."""
    program = call.program
    scope = program.script.scope_of(call.node)
    results = {
        name
        for each in program.preparations
        if each.scope is not scope or each.node.lineno < call.node.lineno
        for name in each.results
    }
    for node in ast.walk(value):
        if written(node) in results:
            return True
        bound = program.bindings.values(node, with_members=True) if depth else []
        if any(_is_of_prepared(call, each, depth - 1) for each in bound):
            return True
    return False


@partial(
    Rule,
    code="DT302",
    name="step-outside-window",
    severity=Severity.WARNING,
    why="Only in the window is it known whether this micro-batch closes it: steps are made too often or too "
    "small.",
    repair="Move it into `with accelerator.accumulate(model):`, together with forward, backward and zero_grad.",
    visits=lambda visitor: visitor.calls,
)
def check_step(call: VisitedCall) -> Iterator[Hit]:
    """An optimizer steps outside accumulate(), or accumulation is asked for and accumulate() never entered."""
    if not call.is_optimizer_step or not call.loops:
        return
    script = call.program.script
    backwards = [each for each in calls_in(call.program, call.loops[0]) if each.is_backward]
    if any(script.method_calls("accumulate", "no_sync")):
        inside = [each for each in backwards if _is_in_window(each)]
        tests = [ast.unparse(each.test) for each in call.conditions()]
        asks_for_sync = any(word in test for test in tests for word in ("sync_gradients", "%", "accum"))
        if inside and not _is_in_window(call) and not asks_for_sync:
            line = inside[0].node.lineno
            what = f"`{call.written}()` stands outside the `accumulate` block of the backward at line {line}"
            yield Hit(call.node, what)
        return
    asked = [
        ast.unparse(keyword.value)
        for each in script.calls()
        if script.name_of(each.func).rpartition(".")[2] == "Accelerator"
        for keyword in each.keywords
        if keyword.arg == "gradient_accumulation_steps"
    ]
    if backwards and not call.conditions() and any(each != "1" for each in asked):
        what = (
            f"`{call.written}()` runs for every batch, though the Accelerator is told "
            f"gradient_accumulation_steps={asked[0]}: no `accumulate` is ever entered"
        )
        yield Hit(call.node, what)


def _is_in_window(call: VisitedCall) -> bool:
    return any(
        word in ast.unparse(item.context_expr)
        for each in call.program.script.enclosing(call.node)
        if isinstance(each, ast.With | ast.AsyncWith)
        for item in each.items
        for word in ("accumulate", "no_sync", "ctx", "context")
    )


@partial(
    Rule,
    code="DT303",
    name="gradients-cleared-before-step",
    severity=Severity.ERROR,
    why="The step sees no gradient: the model does not learn, and nothing says so.",
    repair="Move it after the step, or before the forward.",
    visits=lambda visitor: visitor.scopes,
)
def check_clearing(scope: VisitedScope) -> Iterator[Hit]:
    """zero_grad() stands between backward and step."""
    trains = {call.method for call in scope.calls} >= {"backward", "zero_grad", "step"}
    for statements in scope.sequences() if trains else ():
        backward_line = 0
        cleared: dict[str, ast.Call] = {}
        for statement in statements:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if call is None:
                inner = ast.walk(statement)
                if any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in inner):
                    backward_line, cleared = statement.lineno, {}
            elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                method, owner = call.func.attr, written(call.func.value)
                if method == "backward":
                    backward_line, cleared = call.lineno, {}
                elif method == "zero_grad" and backward_line and is_optimizer(scope.program, call.func.value):
                    cleared[owner] = call
                elif method == "step" and owner in cleared:
                    yield Hit(
                        cleared[owner],
                        f"`{owner}.zero_grad()` stands between the backward (line {backward_line}) and "
                        f"`{owner}.step()` (line {call.lineno})",
                    )


@partial(
    Rule,
    code="DT304",
    name="clipping-past-accelerator",
    severity=Severity.WARNING,
    why="It clips gradients that are still scaled (fp16), at every micro-batch, and of a sharded model by "
    "another norm.",
    repair="Write accelerator.clip_grad_norm_(...).",
    visits=lambda visitor: visitor.calls,
)
def check_clipping(call: VisitedCall) -> Iterator[Hit]:
    """torch.nn.utils.clip_grad_norm_ in a script whose model is prepared."""
    if (
        call.last in _GRADIENT_CLIPS
        and call.name.startswith(("torch.nn.utils", "nn.utils"))
        and call.program.preparations
        and any(call.program.script.method_calls("backward"))
        and not call.is_chosen_against(call.last)
    ):
        yield Hit(
            call.node,
            f"`{call.written}` clips gradients past the Accelerator",
            repair=f"Write accelerator.{call.last}(...), where `accelerator.sync_gradients` is true.",
        )


RULES = (check_backward, check_step, check_clearing, check_clipping)
