"""The signals of a launch: those that stop it, of which two presses of Ctrl-C are one, and those for its ranks."""

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from threading import current_thread, main_thread
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

# A wrapper such as `uv run` hands on the signal that the terminal, or a supervisor, sent to the launcher as well.
_ONE_PRESS_SECONDS = 1.0


class StopSignals:
    """Raises `SignalException` for a signal, as torch's own handler does, but once for those that come together."""

    def __init__(self) -> None:
        self._raised_at = -_ONE_PRESS_SECONDS

    def take_over(self) -> None:
        """Handle the signals that torch's agent handles now. Called in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            handler = signal.getsignal(number)
            if getattr(handler, "__module__", "").startswith("torch.distributed.elastic"):
                signal.signal(number, self._raise)

    def hand_on(self, pids: Collection[int]) -> None:
        """Hand SIGUSR1 and SIGUSR2, which batch systems send to ask for a save, on to the ranks.

        Outside the main thread, which alone may handle signals, nothing is handed on.

        Args:
            pids: Of the ranks that run now.
        """
        if current_thread() is not main_thread():
            return

        def hand(number: int, frame: FrameType | None) -> None:
            del frame
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        for name in ("SIGUSR1", "SIGUSR2"):
            if hasattr(signal, name):  # Windows has none
                signal.signal(getattr(signal, name), hand)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if now - self._raised_at < _ONE_PRESS_SECONDS:
            return
        self._raised_at = now
        caught = signal.Signals(number)
        raise SignalException(f"stopped by {caught.name}", sigval=caught)
