"""Interrupts of a call: the stop button, or Ctrl-C, counted while the ranks are told."""

import signal
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """A context in which SIGINT raises nothing, and is counted.

    In another thread than the main one, where Python handles no signals, it counts nothing.

    Attributes:
        count: The number of interrupts so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: object = None

    def __enter__(self) -> Self:
        # A handler that is not Python's reads as None, and could not be put back.
        if current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is not None:
            self._before = signal.signal(signal.SIGINT, self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)  # pyright: ignore[reportArgumentType]

    def _count(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1
