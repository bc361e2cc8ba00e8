"""A call on running ranks: watch them, show their output, stop them when one fails or at an interrupt."""

import pickle
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Self

from drivetrain_launcher.run.failures import RankFailure, find_root
from drivetrain_launcher.run.notebook.output import OutputView
from drivetrain_launcher.run.notebook.rank_channel import Failed, Message, Returned
from drivetrain_launcher.run.notebook.rank_process import RankProcess
from drivetrain_messages import say

# The interval at which ends of processes and interrupts are noticed; messages and output are at once.
_LOOK_SECONDS = 0.1
# How long a broken connection waits for the failure that it is a consequence of.
_CAUSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The end of a rank that left the function with KeyboardInterrupt, or was killed after an interrupt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRank:
    """The end of a rank that failed, with its pickled exception; None if there is none."""

    failure: RankFailure
    exception: bytes | None = None


Outcome = Returned | Interrupted | FailedRank


class Interrupts:
    """A context in which SIGINT raises nothing, and is counted.

    Outside the main thread, where Python handles no signals, the count stays 0.

    Attributes:
        count: The number of interrupts so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: object = None

    def __enter__(self) -> Self:
        def note(number: int, frame: FrameType | None) -> None:
            del number, frame
            self.count += 1

        # A handler that is not Python's reads as None, and could not be put back.
        if current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is not None:
            self._before = signal.signal(signal.SIGINT, note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)  # pyright: ignore[reportArgumentType]


class Call:
    """A call in progress on the ranks, in rank order. Ranks that are stopped have some seconds to save."""

    def __init__(self, ranks: Sequence[RankProcess], output: OutputView, *, grace_seconds: float) -> None:
        self._ranks = ranks
        self._output = output
        self._grace_seconds = grace_seconds
        self._outcomes: dict[int, Outcome] = {}
        self._began: set[int] = set()
        self._interrupts_seen = 0
        self._stop_at: float | None = None  # when a failure stops the others
        self._kill_at: float | None = None  # when those that still run are killed
        self._refresh_at = 0.0

    def watch(self, interrupts: Interrupts) -> list[Outcome]:
        """Wait until every rank has ended the call.

        Returns:
            The outcomes, in rank order.
        """
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                for name, number in rank.files():
                    selector.register(number, selectors.EVENT_READ, (rank, name))
            while self._list_running():
                # A rank that has ended before the files are read has written nothing after.
                ended = [rank for rank in self._list_running() if rank.exit_code() is not None]
                self._read(selector, _LOOK_SECONDS if not ended else 0)
                if time.monotonic() >= self._refresh_at:
                    self._output.refresh()
                    self._refresh_at = time.monotonic() + _LOOK_SECONDS
                for rank in ended:
                    if rank.rank in self._outcomes:
                        continue
                    self._outcomes[rank.rank] = FailedRank(failure=_failure(rank, time=time.time()))
                    if self._interrupts_seen:
                        self._outcomes[rank.rank] = Interrupted()
                self._heed(interrupts)
                self._stop_in_time()
            while self._read(selector, 0):
                pass
        self._output.finish()
        return [self._outcomes[rank.rank] for rank in self._ranks]

    def _list_running(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.rank not in self._outcomes]

    def _read(self, selector: selectors.BaseSelector, seconds: float) -> bool:
        """Read waiting output, then messages, since output is written first; return False if nothing waited."""
        ready = selector.select(seconds)
        for key, _ in ready:
            rank, name = key.data
            if name != "channel":
                data = rank.read(name)
                if data:
                    self._output.feed(name, rank.rank, data)
                else:
                    selector.unregister(key.fd)
        for key, _ in ready:
            rank, name = key.data
            if name == "channel":
                for stream in ("stdout", "stderr"):
                    if data := rank.read(stream):
                        self._output.feed(stream, rank.rank, data)
                if not self._hear(rank):
                    selector.unregister(key.fd)
        return bool(ready)

    def _hear(self, rank: RankProcess) -> bool:
        """Take a message; return False if the rank will send no more."""
        received = rank.channel.receive()
        if received is None:
            return False
        message, content = received
        if message is Message.BEGAN:
            self._began.add(rank.rank)
        elif message is Message.FIGURE and content is not None:
            with content:
                from IPython.display import Image, display

                content.seek(0)
                display(Image(data=content.read(), format="png"))
        elif message is Message.INTERRUPTED:
            self._outcomes[rank.rank] = Interrupted()
        elif message is Message.RETURNED and content is not None:
            self._outcomes[rank.rank] = Returned(content=content)
        elif message is Message.FAILED and content is not None:
            with content:
                content.seek(0)
                failed: Failed = pickle.load(content)
            failure = _failure(rank, error=failed.line, traceback=failed.traceback, time=failed.time)
            self._outcomes[rank.rank] = FailedRank(failure=failure, exception=failed.exception)
        return True

    def _heed(self, interrupts: Interrupts) -> None:
        """Pass interrupts on to the ranks: the first leaves them time to save, the second kills them."""
        if interrupts.count == self._interrupts_seen:
            return
        is_first = self._interrupts_seen == 0
        self._interrupts_seen = interrupts.count
        if not is_first:
            say("killing the ranks: what they were saving is left uncommitted")
            self._kill_running()
            return
        running = self._list_running()
        if not running:
            return
        many = f"{len(running)} ranks, which have" if len(running) > 1 else "the rank, which has"
        say(f"interrupted: stopping {many} {self._grace_seconds:g} s to save; once more kills them")
        self._kill_at = time.monotonic() + self._grace_seconds
        for rank in running:
            if rank.rank in self._began:
                rank.send_signal(signal.SIGINT)
            else:
                rank.kill()  # it has nothing to save, and would not notice the signal

    def _stop_in_time(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at and self._list_running():
                say(f"killing the ranks that have not stopped within {self._grace_seconds:g} s")
                self._kill_running()
            return
        failures = [each.failure for each in self._outcomes.values() if isinstance(each, FailedRank)]
        if not failures:
            return
        if self._stop_at is None:
            self._stop_at = now + _CAUSE_SECONDS
        if now >= self._stop_at or not find_root(failures).is_aftermath:
            self._kill_at = now + self._grace_seconds
            for rank in self._list_running():
                rank.send_signal(signal.SIGTERM)

    def _kill_running(self) -> None:
        self._kill_at = time.monotonic() + self._grace_seconds
        for rank in self._list_running():
            rank.kill()


def _failure(rank: RankProcess, **facts: Any) -> RankFailure:
    return RankFailure(
        rank=rank.rank, local_rank=rank.rank, pid=rank.pid, exit_code=rank.exit_code(), **facts
    )
