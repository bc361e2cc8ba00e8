"""Where a thread stands: its Python stack as plain values, and what of it tells a person why nothing moves."""

import linecache
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Literal

Owner = Literal["user", "installed", "torch", "drivetrain", "stdlib"]
WaitsFor = Literal["nothing", "device", "ranks"]

# Calls into native code that return once the device has done its part: perhaps a collective that another rank
# never entered, perhaps just much work.
_DEVICE_CALLS = frozenset({"item", "tolist", "cpu", "numpy", "float", "synchronize"})
_RANK_CALLS = frozenset({"wait", "wait_tensor", "barrier"})
# Modules of torch through which a call passes on its way to the native code: they say nothing themselves.
_PASSED_THROUGH = (
    "torch._ops",
    "torch._tensor",
    "torch.utils._contextlib",
    "torch._dynamo",
    "torch._compile",
)
_LONGEST_CALL = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One call of a stack.

    Attributes:
        module: The `__name__` of the module that the code stands in.
        file: The path of its source.
        line: The line that is being run, from 1.
        function: The qualified name of the function.
        expression: The source of the call that is being made; empty where the source is not at hand.
    """

    module: str
    file: str
    line: int
    function: str
    expression: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands, for one row of a table.

    Attributes:
        where: The user's innermost code, as `file:line function`.
        call: What that code is in: a collective, `backward`, a function's name, or the source of the call.
        waits_for: Whose part that call needs to end.
    """

    where: str
    call: str
    waits_for: WaitsFor


def thread_frames(thread_id: int) -> tuple[Frame, ...]:
    """The stack of a running thread, the outermost call first; empty where the thread has ended."""
    frames: list[Frame] = []
    frame: FrameType | None = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage] # Python has no other door
    while frame is not None:
        code = frame.f_code
        frames.append(
            Frame(
                module=str(frame.f_globals.get("__name__", "")),
                file=code.co_filename,
                line=frame.f_lineno or code.co_firstlineno,
                function=code.co_qualname,
                expression=_expression(frame),
            )
        )
        frame = frame.f_back
    return tuple(reversed(frames))


def find_place(frames: Sequence[Frame]) -> Place:
    """The user's innermost line and what it is in, from a stack with the outermost call first.

    Code of the user's own comes before code of an installed package, wherever both are on the stack.
    """
    if not frames:
        return Place(where="(its thread has ended)", call="", waits_for="nothing")
    owners = [frame_owner(frame) for frame in frames]
    wanted = next((owner for owner in ("user", "installed") if owner in owners), owners[0])
    index = len(owners) - 1 - owners[::-1].index(wanted)
    user, inside = frames[index], frames[index + 1 :]
    call, waits_for = _call(user, inside)
    return Place(where=f"{Path(user.file).name}:{user.line} {user.function}", call=call, waits_for=waits_for)


def frame_owner(frame: Frame) -> Owner:
    """Whose code a frame runs."""
    top = frame.module.partition(".")[0]
    if top == "torch":
        return "torch"
    if top == "drivetrain" or top.startswith("drivetrain_"):
        return "drivetrain"
    if re.search(r"[/\\](site|dist)-packages[/\\]", frame.file):
        return "installed"
    if frame.file.startswith(("<frozen ", *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})):
        return "stdlib"
    return "user"


def stack_text(frames: Sequence[Frame]) -> str:
    """The whole stack as Python's tracebacks show one, the innermost call last."""
    lines: list[str] = []
    for frame in frames:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if source := linecache.getline(frame.file, frame.line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)


def _call(user: Frame, inside: Sequence[Frame]) -> tuple[str, WaitsFor]:
    """What the user's line is in, and whose part that needs; `inside` are the frames below the user's."""
    told = [frame for frame in inside if not frame.module.startswith(_PASSED_THROUGH)]
    innermost = told[-1] if told else user
    if innermost.function == "_engine_run_backward":
        return "backward", "ranks"
    if _is_communication(innermost):
        # The outermost has the name that people know, such as all_gather_object; the logger only decorates it.
        named = [frame for frame in told if _is_communication(frame) and "c10d_logger" not in frame.module]
        return (named or [innermost])[0].function, "ranks"
    if frame_owner(innermost) != "stdlib" and (waits_for := _native_wait(innermost)) != "nothing":
        return _shortened(innermost.expression) or innermost.function, waits_for
    if innermost is user:
        return _shortened(innermost.expression), "nothing"
    named = [frame for frame in told if frame_owner(frame) != "stdlib"] or told[:1]
    return f"{named[-1].module.rpartition('.')[2]}.{named[-1].function}", "nothing"


def _native_wait(frame: Frame) -> WaitsFor:
    """Whose part the native code needs that a frame calls."""
    names = {_called_name(frame.expression)}
    if frame_owner(frame) == "torch":
        names.add(frame.function)  # torch.cuda.synchronize calls a native function of another name
    if names & _RANK_CALLS or frame.module.startswith("torch_xla"):
        return "ranks"
    return "device" if names & _DEVICE_CALLS else "nothing"


def _is_communication(frame: Frame) -> bool:
    # Checkpoints stand in torch.distributed too, but what they do for long is write files.
    return frame.module.startswith(("torch.distributed.", "torch.nn.parallel.distributed")) and not (
        frame.module.startswith("torch.distributed.checkpoint")
    )


def _called_name(expression: str) -> str:
    """The name of the function that the source of a call calls: `item` for `loss.mean().item()`."""
    depth = 0
    for index in range(len(expression) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(expression[index], 0)
        if depth == 0:  # the parenthesis that opens the arguments, or no call at all
            match = re.search(r"\w+$", expression[:index].rstrip())
            return match.group() if match and expression[index] == "(" else ""
    return ""


def _shortened(expression: str) -> str:
    text = " ".join(expression.split())
    return text if len(text) <= _LONGEST_CALL else text[: _LONGEST_CALL - 3] + "..."


def _expression(frame: FrameType) -> str:
    """The source of what a frame is executing, from the column numbers that Python keeps beside its bytecode."""
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if positions is None:
        return ""
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, line).encode() for line in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # columns count bytes
    lines[0] = lines[0][start:]
    return b"".join(lines).decode(errors="replace")
