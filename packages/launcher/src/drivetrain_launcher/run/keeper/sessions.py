"""Find and end the processes that a rank has started: all processes of its session.

A rank leads a session of its own, which its loader workers and subprocesses share, whatever process groups they make.
A process that calls setsid leaves on purpose. Standard library only, as the keeper process imports it without
site-packages; `python sessions.py LEADER SECONDS` ends a session.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress

# A process in the kernel's hands, such as one that waits for a disk, dies later; nobody waits longer for it.
_PATIENCE_SECONDS = 5.0
_LOOK_SECONDS = 0.02
# The end of the path by which the keeper process is started.
_KEEPER = b"keeper/process.py"


def end_sessions(
    leaders: Collection[int], *, seconds: float, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Ask the leaders to stop, give them seconds to save, then kill the rest of their sessions.

    `meanwhile` is called again and again until the sessions have ended.
    """
    # A stopped process does not see SIGTERM before SIGCONT.
    for number in (signal.SIGTERM, signal.SIGCONT):
        _send_all(leaders, number)
    deadline = time.monotonic() + seconds
    while any(_running_session(leader) is not None for leader in leaders) and time.monotonic() < deadline:
        meanwhile()
        time.sleep(_LOOK_SECONDS)
    kill_sessions(leaders)


def kill_sessions(leaders: Collection[int]) -> None:
    """Kill all processes in the sessions of these leaders, including processes that appear meanwhile.

    Without a /proc (macOS), the leaders' process groups are killed.
    """
    if not leaders:
        return
    if not os.path.isdir("/proc/self"):
        for leader in leaders:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)
        return
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (members := members_of(leaders)) and time.monotonic() < deadline:
        _send_all(members, signal.SIGKILL)
        time.sleep(0.01)


def has_keeper(launcher: int) -> bool:
    """Return whether the keeper process of a launcher, which may have died, is running; False without a /proc."""
    sought = f'"launcher": {launcher},'.encode()
    for pid in _processes():
        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as command:
            words = command.read()
            if _KEEPER in words and sought in words:
                return True
    return False


def members_of(leaders: Collection[int]) -> list[int]:
    """Return the running processes in the sessions of these leaders; zombies do not count."""
    sessions = set(leaders)
    return [pid for pid in _processes() if _running_session(pid) in sessions]


def stopped_among(pids: Collection[int]) -> list[int]:
    """Return the processes that a signal such as SIGSTOP has stopped; a stop by a debugger does not count."""
    return [pid for pid in pids if (status := _status(pid)) is not None and status[0] == b"T"]


def leaders_with(text: str) -> list[int]:
    """Return the session leaders that started with `text`, such as NAME=VALUE, in their environment."""
    sought = os.fsencode(text)
    found: list[int] = []
    for pid in _processes():
        if _running_session(pid) != pid:
            continue
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment:
            if sought in environment.read():
                found.append(pid)
    return found


def _processes() -> list[int]:
    with suppress(FileNotFoundError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _running_session(pid: int) -> int | None:
    """Return the session of a running process; None if it has ended."""
    status = _status(pid)
    if status is None and not os.path.isdir("/proc/self"):  # macOS
        with suppress(ProcessLookupError):
            return os.getsid(pid)
    return None if status is None or status[0] in (b"Z", b"X") else int(status[3])


def _status(pid: int) -> list[bytes] | None:
    """Return the fields of a process's `stat`: state, parent, group, session and the rest; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _send_all(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    end_sessions([int(sys.argv[1])], seconds=float(sys.argv[2]))
