"""The report on failed ranks: a line for each group of them, then the root failure with its traceback."""

import dis
import json
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain_clusters.protocol import RESUME_EXIT_CODE
from drivetrain_state.hang.report import rank_names
from drivetrain_state.hang.stack import Frame, frame_owner

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# The errors on a rank after another has ended, from gloo, NCCL, the rendezvous store and dispatched loaders.
_AFTERMATH_TYPES = ("DispatchError", "DistBackendError", "DistNetworkError", "DistStoreError")
_AFTERMATH_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
)
_CARRIERS = ("gloo", "NCCL", "nccl", "c10d", "TCPStore")

# The likely cause of each signal that ends a process, and a remedy.
_SIGNALS = {
    "SIGKILL": "by another process or user, or by the kernel for lack of memory where that is not counted",
    "SIGSEGV": "a crash in native code; the stack that faulthandler printed says where",
    "SIGBUS": "most likely shared memory (/dev/shm) is full; fewer loader workers, or a larger /dev/shm, help",
    "SIGABRT": "native code aborted; its message is above, and the lines of Python under it. If it mentions a data "
    "size, the ranks called different collectives, or one with different shapes: `drivetrain lint` finds a "
    "collective that some ranks skip, and --state-debug names each rank's",
    "SIGFPE": "an arithmetic error in native code",
    "SIGILL": "an instruction that this CPU does not have: a library was built for another",
    "SIGTERM": "a user or the scheduler asked it to stop",
    "SIGINT": "it was interrupted",
}


_LACK_OF_MEMORY = (
    "most likely by the kernel, which has killed for lack of memory during the run; a smaller batch or fewer loader "
    "workers help"
)
_SHORT_TRACEBACK = 12  # lines, after which the line above them still stands on the screen
# What torch's C++ code adds to a message: its own stack.
_NATIVE_STACK = "\nException raised from "

# The meaning of drivetrain's own exit codes.
_EXIT_CODES = {
    124: "its watchdog ended it",
    RESUME_EXIT_CODE: "it has saved, and requests a restart",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """A failure of one rank.

    Attributes:
        rank: The rank that failed.
        local_rank: The local rank on this node.
        pid: The id of its process.
        exit_code: The exit code; negative for the signal that ended the process; None while it is still ending.
        error: The exception in one line; empty if there was none.
        traceback: The exception with its traceback; empty if there was none.
        where: The script's innermost line, as `file:line`; empty if it is not known.
        was_shown: Whether the script's own hook has already shown the traceback.
        time: The time of the failure, in seconds since the epoch.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    error: str = ""
    traceback: str = ""
    where: str = ""
    was_shown: bool = False
    time: float = 0.0

    @property
    def signal(self) -> str:
        """The name of the signal that ended the process; empty if none did."""
        if self.exit_code is None or self.exit_code >= 0:
            return ""
        number = -self.exit_code
        return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"

    @property
    def is_aftermath(self) -> bool:
        """True if this looks like a consequence of another rank's failure: a broken connection to it."""
        return _is_aftermath(self.error)

    @property
    def outline(self) -> str:
        """The exception in one line; of a broken connection, without the words of gloo or NCCL."""
        if not self.is_aftermath:
            return self.error.partition("\n")[0]
        at = f" at {Path(self.where).name}" if self.where else ""
        return f"{self.error.partition(':')[0]}{at}, waiting for another rank"

    @property
    def shell_code(self) -> int:
        """The exit code for the shell: the rank's own, or 128 + the signal's number; 1 for an exception.

        If the rank was stopped by SIGTERM while an exception was ending it, the exception counts.
        """
        code = 1 if self.exit_code is None or (self.error and self.signal == "SIGTERM") else self.exit_code
        return code if code >= 0 else 128 - code


def record_error(file: Path, error: BaseException, *, was_shown: bool) -> None:
    """Write an exception to the file that torch's agent reads, with additional fields of drivetrain."""
    frames = _frames_of(error)
    where = next((frame for frame in reversed(frames) if frame_owner(frame) == "user"), None)
    extra = {
        "py_callstack": format_for_user(error),
        "timestamp": str(int(time.time())),
        "drivetrain_time": time.time(),
        "drivetrain_where": f"{where.file}:{where.line}" if where is not None else "",
        "drivetrain_was_shown": was_shown,
    }
    line = "".join(traceback.format_exception_only(error)).strip()
    message = {"message": {"message": line, "extraInfo": extra}}
    # Rename into place, since the agent may read the file at any time.
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(message))
    beside.replace(file)


def format_for_user(error: BaseException) -> str:
    """Format an exception with its traceback, down to the user's line if drivetrain raises it or a connection broke.

    The message of an error of drivetrain suffices: it gives the value or the call, the allowed values and a remedy.
    One line replaces the libraries' frames. A failed assertion is shown in full, and so is an error whose message
    does not repeat the message of its cause.
    """
    frames = _frames_of(error)
    owners = [frame_owner(frame) for frame in frames]
    kept = max((place for place, owner in enumerate(owners, 1) if owner in ("user", "installed")), default=0)
    is_told = isinstance(error, ValueError) or (
        error.__cause__ is None and not isinstance(error, AssertionError)
    )
    is_alone = error.__context__ is None or error.__suppress_context__
    *_, line = message = list(traceback.format_exception_only(error))
    is_ours = is_told and owners[-1:] == ["drivetrain"] and _raised_by_statement(error)
    if not (is_alone and kept and (is_ours or _is_aftermath(line))):
        return "".join(traceback.format_exception(error))
    shown = traceback.format_exception(type(error), error, error.__traceback__, limit=kept, chain=False)
    found = f"  (found by {frames[-1].module}, line {frames[-1].line}; frames of libraries are left out)\n"
    text = "".join([*shown[: -len(message)], found, *message])
    return text.partition(_NATIVE_STACK)[0].rstrip() + "\n"


def _frames_of(error: BaseException) -> list[Frame]:
    """Return the frames of an exception, outermost call first."""
    return [
        Frame(
            module=str(frame.f_globals.get("__name__", "")),
            file=frame.f_code.co_filename,
            line=line,
            function=frame.f_code.co_qualname,
        )
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]


def _is_aftermath(error: str) -> bool:
    kind = error.partition(":")[0]
    # torch's; a connection of the script's own has errors of other kinds.
    is_torchs = kind == "RuntimeError" or any(name in error for name in _CARRIERS)
    return kind.endswith(_AFTERMATH_TYPES) or (
        is_torchs and any(words in error for words in _AFTERMATH_WORDS)
    )


def _raised_by_statement(error: BaseException) -> bool:
    """Return whether the innermost frame raised the exception itself, rather than native code that it called."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return False
    return dis.opname[innermost.tb_frame.f_code.co_code[innermost.tb_lasti]] == "RAISE_VARARGS"


def read_failure(
    record: Mapping[str, object], *, rank: int, local_rank: int, pid: int, exit_code: int | None, seen: float
) -> RankFailure:
    """Build the failure of a rank from its exit code and the JSON of its error file, written by us or torch.

    Without an error file, `record` is empty. Its time takes precedence over `seen` (both in seconds since the epoch).
    """
    message = record.get("message")
    said = message if isinstance(message, Mapping) else {}
    extra = said.get("extraInfo")
    extra = extra if isinstance(extra, Mapping) else {}
    return RankFailure(
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        exit_code=exit_code,
        error=str(said.get("message", "")),
        traceback=str(extra.get("py_callstack", "")),
        where=str(extra.get("drivetrain_where", "")),
        was_shown=bool(extra.get("drivetrain_was_shown", False)),
        time=float(extra.get("drivetrain_time", seen)),
    )


def read_process_failure(rank: int, failure: "ProcessFailure") -> RankFailure:
    """Build the failure of a rank from the agent's record of the rank's process."""
    return read_failure(
        failure.error_file_data,
        rank=rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        seen=float(failure.timestamp),
    )


def find_root(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the root failure: the earliest that is neither a broken connection nor a stop by the launcher."""

    def rank_as_root(failure: RankFailure) -> tuple[bool, bool, float, int]:
        was_stopped = failure.signal == "SIGTERM" and not failure.error
        return was_stopped, failure.is_aftermath, failure.time, failure.rank

    return min(failures, key=rank_as_root)


def announce(failure: RankFailure, *, seconds: float) -> str:
    """Return the line that reports a failure at once, before the other ranks have stopped."""
    if failure.error:
        what = f"failed: {failure.outline}"
    elif failure.signal:
        what = f"was ended by {failure.signal}"
    else:
        what = f"ended with exit code {failure.exit_code}"
    return f"rank {failure.rank} {what}; the other ranks stop now, and have {seconds:g} s to save"


def describe_tail(failure: RankFailure, lines: Sequence[str]) -> str:
    """Return text that shows a failed rank's last lines again; empty without lines."""
    if not lines:
        return ""
    count = f"{len(lines)} lines" if len(lines) > 1 else "line"
    head = f"drivetrain: the last {count} of rank {failure.rank}:\n"
    return head + "".join(f"  {line}\n" for line in lines)


def describe_root(
    failure: RankFailure,
    *,
    num_nodes: int,
    ended: Sequence[int] = (),
    hang: str = "",
    folder: Path | None = None,
    lacked_memory: bool = False,
) -> str:
    """Describe the root failure, with its traceback; a long one is followed by the rank and the line.

    Args:
        failure: The root failure.
        num_nodes: The number of nodes of the run.
        ended: The ranks that have ended with exit code 0.
        hang: The watchdog's report on a hang that lasted to the end; empty if there was none. It comes last.
        folder: The folder of the rank's output; None without one.
        lacked_memory: Whether the kernel killed a process for lack of memory during the run.
    """
    who = f"rank {failure.rank} (local rank {failure.local_rank}, process {failure.pid}"
    who += f", output in {folder})" if folder is not None else ")"
    cause = ""
    if hang and (failure.is_aftermath or not failure.traceback):
        cause = f"drivetrain: the hang before it: {hang}\n"
    elif failure.is_aftermath:
        likely = "most likely it ended early without an error, or it hangs"
        if num_nodes > 1:
            likely = "most likely one on another node failed first; look at that node's output"
        if ended:
            likely = f"{rank_names(ended)} ended with exit code 0"
        cause = f"Another rank did not answer: {likely}.\n"
    if failure.was_shown:
        return f"drivetrain: {who} failed: {failure.error}; its traceback stands above\n{cause}"
    if failure.traceback:
        shown, at = f"{failure.traceback.rstrip()}\n", f" at {failure.where}" if failure.where else ""
        if shown.count("\n") > _SHORT_TRACEBACK:
            return f"drivetrain: the traceback of rank {failure.rank}:\n{shown}drivetrain: {who} failed{at}\n{cause}"
        return f"drivetrain: {who} failed:\n{shown}{cause}"
    if failure.signal:
        likely = (
            _LACK_OF_MEMORY if lacked_memory and failure.signal == "SIGKILL" else _SIGNALS.get(failure.signal)
        )
        why = failure.error or likely
        return f"drivetrain: {who} was ended by {failure.signal}{f': {why}' if why else ''}\n{cause}"
    why = _EXIT_CODES.get(failure.exit_code or 0, "and no exception")
    return f"drivetrain: {who} ended with exit code {failure.exit_code}, {why}\n{cause}"


def describe_others(root: RankFailure, failures: Sequence[RankFailure]) -> str:
    """Describe the other failed ranks, in a line for all that ended alike."""
    alike: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        what = failure.outline or f"exit code {failure.exit_code}"
        if root.error and failure.error == root.error:
            what = "the same error"
        elif failure.error:
            pass
        elif failure.signal == "SIGTERM":
            what = "stopped by the launcher"
        elif failure.signal == "SIGKILL":
            what = "killed (SIGKILL): by the launcher if it did not stop in time, else by another process"
        elif failure.signal:
            what = f"ended by {failure.signal}"
        if failure.rank != root.rank:
            alike.setdefault(what, []).append(failure.rank)
    lines = [f"  {rank_names(ranks)}: {what}\n" for what, ranks in alike.items()]
    return "".join(["drivetrain: the other ranks of this node:\n", *lines]) if lines else ""
