"""The report on failed ranks: the traceback of the root failure, once, then one line for each other rank."""

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

# The likely cause of each signal that ends a process, and a remedy.
_SIGNALS = {
    "SIGKILL": "most likely the system ran out of memory and killed it; a smaller batch or fewer loader workers help",
    "SIGSEGV": "a crash in native code; the stack that faulthandler printed says where",
    "SIGBUS": "most likely shared memory (/dev/shm) is full; fewer loader workers, or a larger /dev/shm, help",
    "SIGABRT": "native code aborted; its message is above. If it mentions a data size, the ranks called a "
    "collective with different shapes: --state-debug shows each rank's",
    "SIGFPE": "an arithmetic error in native code",
    "SIGILL": "an instruction that this CPU does not have: a library was built for another",
    "SIGTERM": "a user or the scheduler asked it to stop",
    "SIGINT": "it was interrupted",
}


# The meaning of drivetrain's own exit codes.
_EXIT_CODES = {
    124: "its watchdog ended it; the table above names the rank that all waited for",
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
        was_shown: Whether the script's own hook has already shown the traceback.
        time: The time of the failure, in seconds since the epoch.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    error: str = ""
    traceback: str = ""
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
        kind = self.error.partition(":")[0]
        broken = any(words in self.error for words in _AFTERMATH_WORDS)
        return kind.endswith(_AFTERMATH_TYPES) or (broken and not kind.endswith("OSError"))

    @property
    def shell_code(self) -> int:
        """The exit code for the shell: the rank's own, or 128 + the signal's number; 1 for an exception.

        If the rank was stopped by SIGTERM while an exception was ending it, the exception counts.
        """
        code = 1 if self.exit_code is None or (self.error and self.signal == "SIGTERM") else self.exit_code
        return code if code >= 0 else 128 - code


def record_error(file: Path, error: BaseException, *, was_shown: bool) -> None:
    """Write an exception to the file that torch's agent reads, with additional fields of drivetrain."""
    extra = {
        "py_callstack": format_for_user(error),
        "timestamp": str(int(time.time())),
        "drivetrain_time": time.time(),
        "drivetrain_was_shown": was_shown,
    }
    line = "".join(traceback.format_exception_only(error)).strip()
    message = {"message": {"message": line, "extraInfo": extra}}
    # Rename into place, since the agent may read the file at any time.
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(message))
    beside.replace(file)


def format_for_user(error: BaseException) -> str:
    """Format an exception with its traceback; for an error that drivetrain raises, only down to the user's line.

    The message of such an error suffices: it gives the value or the call, the allowed values and a remedy. One line
    replaces the library's frames. A failed assertion is shown in full, and so is an error whose message does not
    repeat the message of its cause.
    """
    from drivetrain_state.hang.stack import Frame, frame_owner

    entries = list(traceback.walk_tb(error.__traceback__))
    owners = [
        frame_owner(
            Frame(
                module=str(frame.f_globals.get("__name__", "")),
                file=frame.f_code.co_filename,
                line=line,
                function=frame.f_code.co_qualname,
            )
        )
        for frame, line in entries
    ]
    kept = max((place for place, owner in enumerate(owners, 1) if owner in ("user", "installed")), default=0)
    is_told = isinstance(error, ValueError) or (
        error.__cause__ is None and not isinstance(error, AssertionError)
    )
    is_alone = error.__context__ is None or error.__suppress_context__
    if not (is_told and is_alone and kept and owners[-1] == "drivetrain" and _raised_by_statement(error)):
        return "".join(traceback.format_exception(error))
    shown = traceback.format_exception(type(error), error, error.__traceback__, limit=kept, chain=False)
    innermost, line = entries[-1]
    found = f"  (found by {innermost.f_globals['__name__']}, line {line}; frames of libraries are left out)\n"
    message = traceback.format_exception_only(error)
    return "".join([*shown[: -len(message)], found, *message])


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
        what = f"failed: {failure.error.splitlines()[0]}"
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


def describe_root(failure: RankFailure, *, num_nodes: int, ended: Sequence[int] = ()) -> str:
    """Describe the root failure, with its traceback; `ended` are the ranks that had ended before with exit code 0."""
    elsewhere = (
        "it ended early without an error, or it hangs; a watchdog's table, where one stands above, names the rank"
        if num_nodes == 1
        else "one on another node failed first; look at that node's output"
    )
    cause = f"Another rank did not answer: most likely {elsewhere}."
    if ended:
        who = f"Rank {ended[0]}" if len(ended) == 1 else f"Ranks {', '.join(map(str, ended))}"
        cause = f"{who} had ended before, with exit code 0."
    who = f"rank {failure.rank} (local rank {failure.local_rank}, process {failure.pid})"
    if failure.traceback:
        shown = f"\n{failure.traceback}"
        if failure.was_shown:
            shown = f" {failure.error}; its traceback stands above\n"
        hint = f"\n{cause}\n" if failure.is_aftermath else ""
        return f"drivetrain: {who} failed:{shown}{hint}"
    if failure.signal:
        why = failure.error or _SIGNALS.get(failure.signal, "")
        return f"drivetrain: {who} was ended by {failure.signal}{f': {why}' if why else ''}\n"
    why = _EXIT_CODES.get(failure.exit_code or 0, "and no exception")
    return f"drivetrain: {who} ended with exit code {failure.exit_code}, {why}\n"


def describe_others(root: RankFailure, failures: Sequence[RankFailure]) -> str:
    """Describe the other failed ranks, one line each, or one line for all with the same error as the root."""
    others = sorted((f for f in failures if f.rank != root.rank), key=lambda failure: failure.rank)
    alike = [failure.rank for failure in others if root.error and failure.error == root.error]
    lines: list[str] = []
    for failure in others:
        if failure.rank in alike:
            continue
        what = f"exit code {failure.exit_code}"
        if failure.error:
            broken = " (a connection broke after the first failure)" if failure.is_aftermath else ""
            what = f"{failure.error.splitlines()[0]}{broken}"
        elif failure.signal == "SIGTERM":
            what = "was stopped by the launcher"
        elif failure.signal == "SIGKILL":
            what = "was killed (SIGKILL): by the launcher if it did not stop in time, else by the system"
        elif failure.signal:
            what = f"ended by {failure.signal}"
        lines.append(f"  rank {failure.rank}: {what}\n")
    if alike:
        who = f"rank {alike[0]}" if len(alike) == 1 else f"ranks {', '.join(map(str, alike))}"
        lines.insert(0, f"  {who}: the same error\n")
    return "".join(["drivetrain: the other ranks of this node:\n", *lines]) if lines else ""
