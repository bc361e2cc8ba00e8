"""Devices that are hard-coded: DT401."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import partial

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.visitor import VisitedCall, Visitor

_DEVICE = re.compile(r"^(?:cuda|xpu|npu|mps|hpu|mlu)(:\d+)?$")
_NUMBERED = "every rank of the node uses this one device: the first runs out of memory, the others idle"
_NAMED = "the script runs on no other kind of device, and not on the CPU"


def _visit_training_scripts(visitor: Visitor) -> Sequence[VisitedCall]:
    """Visit the calls of scripts that themselves train on several ranks, not of modules for such scripts."""
    program = visitor.program
    trains = any(program.script.method_calls("prepare", "backward")) or (
        program.collectives.wraps_models and any(call.method == "backward" for call in visitor.calls)
    )
    indexed = {
        each.value
        for each in map(_find_device, program.script.nodes)
        if each is not None and _has_index(each)
    }
    # Parts on several devices by number are a decision, as of one process that is a whole pipeline.
    return visitor.calls if program.script.is_distributed and trains and len(indexed) < 2 else ()


@partial(
    Rule,
    code="DT401",
    name="hard-coded-device",
    severity=Severity.WARNING,
    why="Ranks must use devices of their own, and scripts run on machines with others, or none.",
    repair="Use accelerator.device (prepare moves models, and prepared loaders yield batches there); in plain "
    'torch, f"cuda:{local_rank}".',
    visits=_visit_training_scripts,
)
def check_device(call: VisitedCall) -> Iterator[Hit]:
    """A device is written down: .cuda(), .to("cuda"), torch.device("cuda:0"), device_map={"": 0}."""
    script = call.program.script
    place = _find_place(call)
    # Plain torch scripts select the rank's own device, which "cuda" then is.
    if place is None or (
        call.name == "torch.cuda.set_device"
        and any(isinstance(each, ast.If | ast.ExceptHandler) for each in script.around(call.node))
    ):
        return
    is_numbered = _has_index(place) if isinstance(place, ast.Constant) else isinstance(place, ast.Dict)
    if is_numbered or script.uses_accelerator:
        text = ast.unparse(call.node)
        yield Hit(
            call.node,
            f"`{text if len(text) < 50 else f'{call.written}(...)'}`: {_NUMBERED if is_numbered else _NAMED}",
            severity=Severity.ERROR if is_numbered else None,
        )


def _find_place(call: VisitedCall) -> ast.AST | None:
    """Return the part of a call that hard-codes a device."""
    first = call.node.args[0] if call.node.args else None
    if call.method == "cuda" and not call.name.startswith("torch.") and not call.node.keywords:
        if first is None:
            return call.node
        return first if _is_number(first) else _find_device(first)
    if first is not None:
        if call.name == "torch.cuda.set_device" and _is_number(first):
            return first
        if call.method == "to" or call.name in ("torch.device", "device"):
            return _find_device(first)
    for keyword in call.node.keywords:
        if keyword.arg in ("device", "device_map") and (found := _find_device(keyword.value)):
            return found
        match keyword.value:
            # The whole model, whose name is empty, on a device that is written down.
            case ast.Dict(keys=[ast.Constant(value="")], values=[value]) if keyword.arg == "device_map":
                if _is_number(value) or _find_device(value):
                    return keyword.value
            case _:
                pass
    return None


def _find_device(node: ast.AST) -> ast.Constant | None:
    """Return the constant device in an expression, or in either branch of a conditional expression."""
    if isinstance(node, ast.IfExp):
        return _find_device(node.body) or _find_device(node.orelse)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _DEVICE.match(node.value):
        return node
    return None


def _has_index(device: ast.Constant) -> bool:
    return not isinstance(device.value, str) or ":" in device.value


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


RULES = (check_device,)
