"""Backward and optimizer steps that miss what the Accelerator does: DT301 to DT304."""

import ast
from collections.abc import Iterator

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.program import Program
from drivetrain_lint.reading.imports import last_name, word_set, written
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.visitor import (
    VisitedCall,
    VisitedScope,
    calls_in,
    is_optimizer,
    visit_calls,
    visit_scopes,
)

# Objects other than a loss that have a `backward` of their own.
_ENGINES = tuple(word_set("accelerator engine fabric manager optimizer opt strategy self ctx booster"))
_DEPTH = 3
_GRADIENT_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def _check_backward(call: VisitedCall) -> Iterator[Hit]:
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
    yield Hit(node=call.node, what=what, mend=f"Write accelerator.backward({ast.unparse(loss)}).")


def _is_of_prepared(call: VisitedCall, value: ast.expr, depth: int) -> bool:
    """Return whether a loss is computed from something that `prepare` returned before, as far as names tell."""
    program = call.program
    scope = program.script.scope_of(call.node)
    results = {
        name
        for each in program.preparations
        if each.scope is not scope or each.line < call.node.lineno
        for name in each.results
    }
    for node in ast.walk(value):
        if written(node) in results:
            return True
        bound = program.bindings.values(node, with_members=True) if depth else []
        if any(_is_of_prepared(call, each, depth - 1) for each in bound):
            return True
    return False


def _check_step(call: VisitedCall) -> Iterator[Hit]:
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
            yield Hit(node=call.node, what=what)
    elif backwards and not call.conditions() and (steps := _accumulation_steps(call.program)):
        what = (
            f"`{call.written}()` runs for every batch, though the Accelerator is told "
            f"gradient_accumulation_steps={steps}: no `accumulate` is ever entered"
        )
        yield Hit(node=call.node, what=what)


def _accumulation_steps(program: Program) -> str:
    """Return the accumulation that the script asks for, as written; empty if it asks for none."""
    asked = [
        ast.unparse(keyword.value)
        for call in program.script.calls()
        if program.script.name_of(call.func).rpartition(".")[2] == "Accelerator"
        for keyword in call.keywords
        if keyword.arg == "gradient_accumulation_steps"
    ]
    return asked[0] if any(each != "1" for each in asked) else ""


def _is_in_window(call: VisitedCall) -> bool:
    return any(
        word in ast.unparse(item.context_expr)
        for each in call.program.script.enclosing(call.node)
        if isinstance(each, ast.With | ast.AsyncWith)
        for item in each.items
        for word in ("accumulate", "no_sync", "ctx", "context")
    )


def _check_clearing(scope: VisitedScope) -> Iterator[Hit]:
    if {call.method for call in scope.calls} >= {"backward", "zero_grad", "step"}:
        for statements in scope.sequences():
            yield from _find_cleared(scope.program, statements)


def _find_cleared(program: Program, statements: list[ast.stmt]) -> Iterator[Hit]:
    """Find backward, then zero_grad, then step of one optimizer, in statements that run one after the other."""
    backward_line = 0
    cleared: dict[str, ast.Call] = {}
    for statement in statements:
        if not isinstance(statement, ast.Expr):
            if any(
                isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(statement)
            ):
                backward_line, cleared = statement.lineno, {}
            continue
        call = statement.value
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        method, owner = call.func.attr, written(call.func.value)
        if method == "backward":
            backward_line, cleared = call.lineno, {}
        elif method == "zero_grad" and backward_line and is_optimizer(program, call.func.value):
            cleared[owner] = call
        elif method == "step" and owner in cleared:
            yield Hit(
                node=cleared[owner],
                what=f"`{owner}.zero_grad()` stands between the backward (line {backward_line}) and "
                f"`{owner}.step()` (line {call.lineno})",
            )


def _check_clipping(call: VisitedCall) -> Iterator[Hit]:
    if (
        call.last in _GRADIENT_CLIPS
        and call.name.startswith(("torch.nn.utils", "nn.utils"))
        and call.program.preparations
        and any(call.program.script.method_calls("backward"))
        and not call.is_chosen_against(call.last)
    ):
        yield Hit(
            node=call.node,
            what=f"`{call.written}` clips gradients past the Accelerator",
            mend=f"Write accelerator.{call.last}(...), where `accelerator.sync_gradients` is true.",
        )


RULES = (
    Rule(
        code="DT301",
        name="backward-past-accelerator",
        severity=Severity.ERROR,
        summary="loss.backward() in a script whose model is prepared.",
        why="The loss is neither divided by the accumulation steps nor scaled for fp16; drivetrain refuses the next "
        "step.",
        mend="Write accelerator.backward(loss).",
        visits=visit_calls,
        check=_check_backward,
    ),
    Rule(
        code="DT302",
        name="step-outside-window",
        severity=Severity.WARNING,
        summary="An optimizer steps outside accumulate(), or accumulation is asked for and accumulate() never "
        "entered.",
        why="Only in the window is it known whether this micro-batch closes it: steps are made too often or too "
        "small.",
        mend="Move it into `with accelerator.accumulate(model):`, together with forward, backward and zero_grad.",
        visits=visit_calls,
        check=_check_step,
    ),
    Rule(
        code="DT303",
        name="gradients-cleared-before-step",
        severity=Severity.ERROR,
        summary="zero_grad() stands between backward and step.",
        why="The step sees no gradient: the model does not learn, and nothing says so.",
        mend="Move it after the step, or before the forward.",
        visits=visit_scopes,
        check=_check_clearing,
    ),
    Rule(
        code="DT304",
        name="clipping-past-accelerator",
        severity=Severity.WARNING,
        summary="torch.nn.utils.clip_grad_norm_ in a script whose model is prepared.",
        why="It clips gradients that are still scaled (fp16), at every micro-batch, and of a sharded model by "
        "another norm.",
        mend="Write accelerator.clip_grad_norm_(...).",
        visits=visit_calls,
        check=_check_clipping,
    ),
)
