"""A rank that another process has forked, with what torch's agent uses of `subprocess.Popen`."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from subprocess import TimeoutExpired


class ForkedRank:
    """A running rank, or one that has ended.

    Args:
        pid: The id of its process.
        look: The function that waits up to a number of seconds, or without end for None, for ranks to end, and sets
            their `returncode`.

    Attributes:
        pid: The id of its process.
        returncode: The exit code, negative for the signal that ended it; None while it is not known to have ended.
    """

    def __init__(self, pid: int, look: Callable[[float | None], None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._look = look

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        if self.returncode is None:
            self._look(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code.

        Args:
            timeout: The seconds to wait for; None for as long as it takes.

        Raises:
            TimeoutExpired: It still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            rest = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and rest is not None and rest <= 0:
                raise TimeoutExpired("rank", timeout)
            self._look(rest)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it is known to have ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
