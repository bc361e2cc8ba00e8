"""The signals of a launch: those that stop it, without duplicates, and those to forward to its ranks."""

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from threading import current_thread, main_thread
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

# A wrapper such as `uv run` forwards the signal that the terminal, or a supervisor, also sends to the launcher.
_ONE_PRESS_SECONDS = 1.0


class StopSignals:
    """A signal handler that raises `SignalException` as torch's does, but once for signals within one second."""

    def __init__(self) -> None:
        self._raised_at = -_ONE_PRESS_SECONDS

    def take_over(self) -> None:
        """Replace the signal handlers of torch's agent. Must be called in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            handler = signal.getsignal(number)
            if getattr(handler, "__module__", "").startswith("torch.distributed.elastic"):
                signal.signal(number, self._raise)

    def forward_user_signals(self, pids: Collection[int]) -> None:
        """Forward SIGUSR1 and SIGUSR2, with which batch systems request a save, to the ranks.

        Outside the main thread, which alone can handle signals, this does nothing.

        Args:
            pids: The process ids of the running ranks.
        """
        if current_thread() is not main_thread():
            return

        def forward(number: int, frame: FrameType | None) -> None:
            del frame
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        for name in ("SIGUSR1", "SIGUSR2"):
            if hasattr(signal, name):  # not on Windows
                signal.signal(getattr(signal, name), forward)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if now - self._raised_at < _ONE_PRESS_SECONDS:
            return
        self._raised_at = now
        caught = signal.Signals(number)
        raise SignalException(f"stopped by {caught.name}", sigval=caught)
