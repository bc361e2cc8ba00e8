"""The Python stack of a thread as plain values, and its summary: the user's line and the call that waits."""

import linecache
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Literal

Owner = Literal["user", "installed", "torch", "drivetrain", "stdlib"]
WaitsFor = Literal["nothing", "device", "ranks"]

# Calls into native code that wait for the device: perhaps for a collective that another rank never entered, perhaps
# just for much work.
_DEVICE_CALLS = frozenset({"item", "tolist", "cpu", "numpy", "float", "synchronize"})
_RANK_CALLS = frozenset({"wait", "wait_tensor", "barrier"})
# Modules of torch between a call and its native code; their frames carry no information.
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
    """A frame of a call stack; `expression` is the source of its current call, empty if that is not available."""

    module: str
    file: str
    line: int
    function: str
    expression: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """The position of a rank: the user's innermost frame as `file:line function`, and its current call."""

    where: str
    call: str
    waits_for: WaitsFor


def thread_frames(thread_id: int) -> tuple[Frame, ...]:
    """Return the stack of a running thread, outermost call first; empty if the thread has ended."""
    newest = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage] # Python has no public equivalent
    frames = [
        Frame(
            module=str(frame.f_globals.get("__name__", "")),
            file=frame.f_code.co_filename,
            line=line or frame.f_code.co_firstlineno,
            function=frame.f_code.co_qualname,
            expression=_read_expression(frame),
        )
        for frame, line in (walk_stack(newest) if newest else ())
    ]
    return tuple(reversed(frames))


def find_place(frames: Sequence[Frame]) -> RankPosition:
    """Return the user's innermost line and its current call, from a stack with the outermost call first."""
    if not frames:
        return RankPosition(where="(its thread has ended)", call="", waits_for="nothing")
    owners = [frame_owner(frame) for frame in frames]
    # The user's own code takes precedence over that of installed packages, wherever they are on the stack.
    wanted = next((owner for owner in ("user", "installed") if owner in owners), owners[0])
    index = len(owners) - 1 - owners[::-1].index(wanted)
    user, inside = frames[index], frames[index + 1 :]
    call, waits_for = _call(user, inside)
    return RankPosition(
        where=f"{Path(user.file).name}:{user.line} {user.function}", call=call, waits_for=waits_for
    )


def frame_owner(frame: Frame) -> Owner:
    """Return the owner of the code that a frame executes."""
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
    """Format the whole stack like a Python traceback, innermost call last."""
    lines: list[str] = []
    for frame in frames:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if source := linecache.getline(frame.file, frame.line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)


def _call(user: Frame, inside: Sequence[Frame]) -> tuple[str, WaitsFor]:
    """Return the call in the user's line and its kind of wait; `inside` has the frames below that line."""
    told = [frame for frame in inside if not frame.module.startswith(_PASSED_THROUGH)]
    innermost = told[-1] if told else user
    if innermost.function == "_engine_run_backward":
        return "backward", "ranks"
    if _is_communication(innermost):
        # The outermost frame has the public name, such as all_gather_object; c10d_logger is only its decorator. What
        # stands around it, such as FSDP, makes several collectives from one line.
        named = [frame for frame in told if _is_communication(frame) and "c10d_logger" not in frame.module]
        collectives = [frame for frame in named if frame.module == "torch.distributed.distributed_c10d"]
        return (collectives or named or [innermost])[0].function, "ranks"
    owner, names = frame_owner(innermost), {_find_called_name(innermost.expression)}
    if owner == "torch":
        names.add(innermost.function)  # torch.cuda.synchronize calls a native function of another name
    for_ranks = bool(names & _RANK_CALLS) or innermost.module.startswith("torch_xla")
    if owner != "stdlib" and (for_ranks or names & _DEVICE_CALLS):
        return _shorten(innermost.expression) or innermost.function, "ranks" if for_ranks else "device"
    if innermost is user:
        return _shorten(innermost.expression), "nothing"
    named = [frame for frame in told if frame_owner(frame) != "stdlib"] or told[:1]
    return f"{named[-1].module.rpartition('.')[2]}.{named[-1].function}", "nothing"


def _is_communication(frame: Frame) -> bool:
    # Checkpoint code is in torch.distributed too, but mostly writes files.
    return frame.module.startswith(("torch.distributed.", "torch.nn.parallel.distributed")) and not (
        frame.module.startswith("torch.distributed.checkpoint")
    )


def _find_called_name(expression: str) -> str:
    """Return `item` for `loss.mean().item()`."""
    depth = 0
    for index in range(len(expression) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(expression[index], 0)
        if depth == 0:  # the parenthesis that opens the arguments, or not a call
            match = re.search(r"\w+$", expression[:index].rstrip())
            return match.group() if match and expression[index] == "(" else ""
    return ""


def _shorten(expression: str) -> str:
    text = " ".join(expression.split())
    return text if len(text) <= _LONGEST_CALL else text[: _LONGEST_CALL - 3] + "..."


def _read_expression(frame: FrameType) -> str:
    """Return the source of the expression that a frame executes, from the column numbers in its bytecode."""
    positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    first, last, start, end = next(positions, (None, None, None, None))
    # An interpreter with -X no_debug_ranges.
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, line).encode() for line in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # columns are byte offsets
    lines[0] = lines[0][start:]
    return b"".join(lines).decode(errors="replace")
