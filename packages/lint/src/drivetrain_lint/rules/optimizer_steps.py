"""Backward and optimizer steps that miss what the Accelerator does: DT301 to DT304."""

import ast
from collections.abc import Iterator

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.program import Program
from drivetrain_lint.reading.imports import written
from drivetrain_lint.reading.script import Function
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.training_loop import (
    blocks,
    conditions_around,
    is_backward,
    is_optimizer,
    last_name,
    loops_around,
    own_calls,
    scopes,
    straight_line,
)

# Objects other than a loss that have a `backward` of their own.
_ENGINES = (
    "accelerator",
    "engine",
    "fabric",
    "manager",
    "optimizer",
    "opt",
    "strategy",
    "self",
    "ctx",
    "booster",
)
_DEPTH = 3
_GRADIENT_CLIPS = {"clip_grad_norm_": "clip_grad_norm_", "clip_grad_value_": "clip_grad_value_"}


def _bypassing(program: Program) -> Iterator[Hit]:
    script = program.script
    if not program.preparations:
        return
    for call in script.calls():
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "backward"):
            continue
        if call.args:  # an engine's, which takes the loss
            continue
        owner = call.func.value
        last = last_name(owner).lower()
        if script.is_accelerator(owner) or last.endswith(_ENGINES) or written(owner).startswith("torch."):
            continue
        if _chosen_against(program, call, "backward") or not _of_prepared(program, call, owner, _DEPTH):
            continue
        loss = ast.unparse(owner)
        if isinstance(owner, ast.Call) and last_name(owner.func) in ("scale", "scale_loss") and owner.args:
            loss = ast.unparse(owner.args[0])
        yield Hit(
            node=call,
            what=f"`{ast.unparse(call.func)}()` goes past the Accelerator",
            mend=f"Write accelerator.backward({loss}).",
        )


def _of_prepared(program: Program, call: ast.Call, value: ast.expr, depth: int) -> bool:
    """Return whether a loss is computed from something that `prepare` returned before, as far as names tell."""
    scope = program.script.scope_of(call)
    results = {
        name
        for each in program.preparations
        if each.scope is not scope or each.line < call.lineno
        for name in each.results
    }
    for node in ast.walk(value):
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        if written(node) in results:
            return True
        bound = [each.value for each in program.bindings.of(node) if each.value is not None]
        if depth and any(_of_prepared(program, call, each, depth - 1) for each in bound):
            return True
    return False


def _chosen_against(program: Program, call: ast.Call, method: str) -> bool:
    """Return whether another branch around a call does the same through the Accelerator."""
    script = program.script
    for each in script.enclosing(call):
        if isinstance(each, Function):
            return False
        if isinstance(each, ast.If | ast.IfExp):
            if any(True for _ in script.method_calls(method, within=each)):
                return True
            if "accelerator" in ast.unparse(each.test).lower():
                return True
    return False


def _outside_window(program: Program) -> Iterator[Hit]:
    script = program.script
    windows = list(script.method_calls("accumulate", "no_sync"))
    if not windows:
        yield from _never_in_window(program)
        return
    for scope in scopes(program):
        for call in own_calls(program.script, scope):
            if not _is_step(program, call) or _in_window(program, call) or _asks_for_sync(program, call):
                continue
            loops = loops_around(script, call)
            inside = [
                each
                for each in (own_calls(program.script, loops[0]) if loops else ())
                if is_backward(script, each) and _in_window(program, each)
            ]
            if inside:
                yield Hit(
                    node=call,
                    what=f"`{written(call.func)}()` stands outside the `accumulate` block of the backward at line "
                    f"{inside[0].lineno}",
                )


def _never_in_window(program: Program) -> Iterator[Hit]:
    """Find steps in a script that asks for accumulation and never enters a window."""
    script = program.script
    asked = [
        keyword.value
        for call in script.calls()
        if script.name_of(call.func).rpartition(".")[2] == "Accelerator"
        for keyword in call.keywords
        if keyword.arg == "gradient_accumulation_steps"
    ]
    if not asked or all(isinstance(each, ast.Constant) and each.value == 1 for each in asked):
        return
    for call in script.calls():
        loops = loops_around(script, call)
        if not _is_step(program, call) or not loops or conditions_around(script, call):
            continue
        if any(is_backward(script, each) for each in script.calls(loops[0])):
            steps = ast.unparse(asked[0])
            yield Hit(
                node=call,
                what=f"`{written(call.func)}()` runs for every batch, though the Accelerator is told "
                f"gradient_accumulation_steps={steps}: no `accumulate` is ever entered",
            )


def _is_step(program: Program, call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "step"):
        return False
    return is_optimizer(written(call.func.value), call.func.value, program.bindings)


def _in_window(program: Program, call: ast.Call) -> bool:
    for each in program.script.enclosing(call):
        if isinstance(each, ast.With | ast.AsyncWith):
            text = " ".join(ast.unparse(item.context_expr) for item in each.items)
            if "accumulate" in text or "no_sync" in text or "ctx" in text or "context" in text:
                return True
    return False


def _asks_for_sync(program: Program, call: ast.Call) -> bool:
    tests = [ast.unparse(each.test) for each in conditions_around(program.script, call)]
    return any("sync_gradients" in test or "%" in test or "accum" in test for test in tests)


def _cleared_too_early(program: Program) -> Iterator[Hit]:
    for scope in scopes(program):
        called = {
            call.func.attr
            for call in own_calls(program.script, scope)
            if isinstance(call.func, ast.Attribute)
        }
        if not called >= {"backward", "zero_grad", "step"}:
            continue
        for block in blocks(program.script, scope):
            yield from _cleared_in(program, block)


def _cleared_in(program: Program, block: list[ast.stmt]) -> Iterator[Hit]:
    """Find backward, then zero_grad, then step of one optimizer, in statements that run one after the other."""
    backward_line = 0
    cleared: dict[str, ast.Call] = {}
    for statement in straight_line(block):
        calls = [statement.value] if isinstance(statement, ast.Expr) else []
        for call in calls:
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            owner = written(call.func.value)
            if call.func.attr == "backward":
                backward_line, cleared = call.lineno, {}
            elif (
                call.func.attr == "zero_grad"
                and backward_line
                and is_optimizer(owner, call.func.value, program.bindings)
            ):
                cleared[owner] = call
            elif call.func.attr == "step" and owner in cleared:
                yield Hit(
                    node=cleared[owner],
                    what=f"`{owner}.zero_grad()` stands between the backward (line {backward_line}) and "
                    f"`{owner}.step()` (line {call.lineno})",
                )
        inner = ast.walk(statement) if not calls else ()
        if any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in inner):
            backward_line, cleared = statement.lineno, {}


def _own_clipping(program: Program) -> Iterator[Hit]:
    if not program.preparations or not any(program.script.method_calls("backward")):
        return
    for call in program.script.calls():
        name = program.script.name_of(call.func)
        function = name.rpartition(".")[2]
        if function not in _GRADIENT_CLIPS or not name.startswith(("torch.nn.utils", "nn.utils")):
            continue
        if _chosen_against(program, call, function):
            continue
        yield Hit(
            node=call,
            what=f"`{written(call.func)}` clips gradients past the Accelerator",
            mend=f"Write accelerator.{function}(...), where `accelerator.sync_gradients` is true.",
        )


RULES = (
    Rule(
        code="DT301",
        name="backward-past-accelerator",
        severity=Severity.ERROR,
        summary="loss.backward() in a script whose model is prepared.",
        why="The loss is neither divided by the accumulation steps nor scaled for fp16; drivetrain "
        "refuses the next step.",
        mend="Write accelerator.backward(loss).",
        check=_bypassing,
    ),
    Rule(
        code="DT302",
        name="step-outside-window",
        severity=Severity.WARNING,
        summary="An optimizer steps outside accumulate(), or accumulation is asked for and "
        "accumulate() never entered.",
        why="Only in the window is it known whether this micro-batch closes it: steps are made too "
        "often or too small.",
        mend="Move it into `with accelerator.accumulate(model):`, together with forward, backward and zero_grad.",
        check=_outside_window,
    ),
    Rule(
        code="DT303",
        name="gradients-cleared-before-step",
        severity=Severity.ERROR,
        summary="zero_grad() stands between backward and step.",
        why="The step sees no gradient: the model does not learn, and nothing says so.",
        mend="Move it after the step, or before the forward.",
        check=_cleared_too_early,
    ),
    Rule(
        code="DT304",
        name="clipping-past-accelerator",
        severity=Severity.WARNING,
        summary="torch.nn.utils.clip_grad_norm_ in a script whose model is prepared.",
        why="It clips gradients that are still scaled (fp16), at every micro-batch, and of a "
        "sharded model by another norm.",
        mend="Write accelerator.clip_grad_norm_(...).",
        check=_own_clipping,
    ),
)
