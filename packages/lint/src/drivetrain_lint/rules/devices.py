"""Devices that are written down: DT401."""

import ast
import re
from collections.abc import Iterator

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.program import Program
from drivetrain_lint.reading.imports import written
from drivetrain_lint.rules.rule import Rule

_KINDS = "cuda|xpu|npu|mps|hpu|mlu"
_INDEXED = re.compile(rf"^({_KINDS}):\d+$")
_ANY = re.compile(rf"^({_KINDS})(:\d+)?$")
_NUMBERED = "every rank of the node uses this one device: the first runs out of memory, the others idle"
_NAMED = "the script runs on no other kind of device, and not on the CPU"


def _hard_coded(program: Program) -> Iterator[Hit]:
    script = program.script
    if not script.is_distributed or not _trains(program) or _names_several(program):
        return
    for call in script.calls():
        name = script.name_of(call.func)
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        place = _place(call, name, method)
        if place is not None:
            # Plain torch scripts select the rank's own device, which "cuda" then is.
            if name == "torch.cuda.set_device" and _is_chosen(program, call):
                continue
            if _is_numbered(place) or script.uses_accelerator:
                shown = ast.unparse(call) if len(ast.unparse(call)) < 50 else written(call.func) + "(...)"
                if _is_numbered(place):
                    yield Hit(node=call, what=f"`{shown}`: {_NUMBERED}", severity=Severity.ERROR)
                else:
                    yield Hit(node=call, what=f"`{shown}`: {_NAMED}")


def _is_chosen(program: Program, call: ast.Call) -> bool:
    """Return whether a test or a handler around a call makes it one choice of several."""
    for each in program.script.enclosing(call):
        if isinstance(each, ast.If | ast.ExceptHandler):
            return True
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            break
    return False


def _place(call: ast.Call, name: str, method: str) -> ast.AST | None:
    """Return the part of a call that writes a device down."""
    if method == "cuda" and not name.startswith("torch.") and not call.keywords:
        if not call.args:
            return call
        return call.args[0] if _is_zero(call.args[0]) or _device(call.args[0]) else None
    if name == "torch.cuda.set_device" and call.args and _is_zero(call.args[0]):
        return call.args[0]
    if (method == "to" or name in ("torch.device", "device")) and call.args:
        return _device(call.args[0])
    for keyword in call.keywords:
        if keyword.arg in ("device", "device_map") and (found := _device(keyword.value)):
            return found
        if keyword.arg == "device_map" and _maps_to_first(keyword.value):
            return keyword.value
    return None


def _device(node: ast.expr) -> ast.expr | None:
    """Return the constant device in an expression, that of either branch of a condition included."""
    if isinstance(node, ast.IfExp):
        return _device(node.body) or _device(node.orelse)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _ANY.match(node.value):
        return node
    return None


def _is_numbered(place: ast.AST) -> bool:
    if isinstance(place, ast.Constant):
        return not isinstance(place.value, str) or bool(_INDEXED.match(place.value))
    return isinstance(place, ast.Dict)


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _maps_to_first(node: ast.expr) -> bool:
    if not isinstance(node, ast.Dict) or len(node.keys) != 1 or node.keys[0] is None:
        return False
    key, value = node.keys[0], node.values[0]
    return (
        isinstance(key, ast.Constant) and key.value == "" and (_is_zero(value) or _device(value) is not None)
    )


def _trains(program: Program) -> bool:
    """Return whether the script trains on several ranks itself, rather than serve scripts that do."""
    if any(program.script.method_calls("prepare", "backward")):
        return True
    return program.collectives.wraps_models and any(
        isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
        for call in program.script.calls()
    )


def _names_several(program: Program) -> bool:
    """Return whether the script places parts on several devices by number, as one process of a pipeline may."""
    indexed = {
        node.value
        for node in program.script.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _INDEXED.match(node.value)
    }
    return len(indexed) > 1


RULES = (
    Rule(
        code="DT401",
        name="hard-coded-device",
        severity=Severity.WARNING,
        summary='A device is written down: .cuda(), .to("cuda"), torch.device("cuda:0"), device_map={"": 0}.',
        why="Ranks must use devices of their own, and scripts run on machines with others, or none.",
        mend="Use accelerator.device (prepare moves models, and prepared loaders yield batches "
        "there); in plain torch, "
        'f"cuda:{local_rank}".',
        check=_hard_coded,
    ),
)
