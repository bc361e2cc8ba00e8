"""Agree on one step among all ranks without a collective: signals and timers reach each rank at its own time."""

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Event, Thread

from torch.distributed import DistError, PrefixStore, Store

from drivetrain_checkpoint.errors import OtherRankFailedError

_POLL_SECONDS = 0.25  # while no rank asks for a step
_PAUSE_SECONDS = 0.01  # while the ranks agree on one
_ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Decision:
    """A step that the ranks have agreed on.

    Attributes:
        step: The agreed step, which no rank has passed.
        reasons: The reasons for which ranks asked for it, such as `"SIGTERM"`.
    """

    step: int
    reasons: tuple[str, ...]


class _EndedError(Exception):
    """A rank, this one or another, takes no more steps."""


class AgreedStep:
    """A rank's end of an agreement on a step.

    Any rank may ask for a step. A thread on every rank then publishes the rank's next step and holds the rank there
    until all ranks have published theirs; the ranks agree on the latest of them. Until a rank asks, a step costs a
    lock and a comparison. After a rank has closed its end, there are no more agreements.

    Args:
        store: A connection to the store of all ranks, used by this object's thread alone; None in one process.
        rank: The rank of this process.
        world_size: The number of ranks.
        patience_seconds: The longest time to hold a rank, in seconds.
    """

    def __init__(self, store: Store | None, *, rank: int, world_size: int, patience_seconds: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._patience_seconds = patience_seconds
        self._changed = Condition()
        self._step = 0
        self._gate: int | None = None
        self._decision: Decision | None = None
        # No lock: signal handlers append to it, and must not block. One deque for good, so that no request is lost.
        self._asked: deque[str] = deque()
        self._stopping = Event()
        self._is_over = False  # a rank has closed its end
        self._thread: Thread | None = None
        if store is not None:
            self._thread = Thread(
                target=self._talk, args=(store,), name="drivetrain agreed step", daemon=True
            )
            self._thread.start()

    def ask(self, reason: str) -> None:
        """Ask for a step. May be called by a signal handler, on any rank."""
        self._asked.append(reason)

    def reached(self, step: int) -> Decision | None:
        """Return the decision if this is the agreed step, else None.

        Called on all ranks, by the main thread, once per step.

        Raises:
            OtherRankFailedError: A rank did not answer within `patience_seconds`.
        """
        if self._thread is None:
            asked = tuple(dict.fromkeys(self._requests()))
            return Decision(step, asked) if asked else None
        with self._changed:
            self._step = step
            if self._gate is None or step < self._gate:
                return None
            is_settled = self._changed.wait_for(
                lambda: self._decision is not None or self._is_over, self._patience_seconds
            )
            if not is_settled:
                raise OtherRankFailedError(
                    f"the ranks did not agree on a step to save at within {self._patience_seconds:g} s: one of them "
                    "has ended, or does not take steps"
                )
            if self._decision is None or step < self._decision.step:
                return None
            decision, self._gate, self._decision = self._decision, None, None
            return decision

    def close(self) -> None:
        """Stop the thread and take part in no further agreement."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _talk(self, store: Store) -> None:
        number = 0
        try:
            while not self._stopping.wait(_POLL_SECONDS):
                number += self._take_turn(PrefixStore(str(number), store), store)
            store.set(_ENDED, "")
        except _EndedError:
            with suppress(DistError):
                store.set(_ENDED, "")
        except DistError:
            pass  # the process that hosts the store is gone, and with it the run
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _requests(self) -> Iterator[str]:
        """Take the requests of this rank, one after the other."""
        while self._asked:
            yield self._asked.popleft()

    def _take_turn(self, store: Store, whole: Store) -> bool:
        """Publish this rank's requests; if any rank has asked, agree on a step, reach it and return True."""
        for reason in self._requests():
            store.set(f"reason/{store.add('reasons', 1)}", reason)
        if not store.add("reasons", 0):
            return False
        with self._changed:  # reached() holds the main thread at this step until the ranks have agreed
            self._gate = self._step + 1
        store.set(f"gate/{self._rank}", str(self._gate))
        if self._rank == 0:
            gates = [int(self._read(store, f"gate/{rank}", whole)) for rank in range(self._world_size)]
            reasons = [
                self._read(store, f"reason/{index + 1}", whole) for index in range(store.add("reasons", 0))
            ]
            store.set("decision", json.dumps([max(gates), list(dict.fromkeys(reasons))]))
        step, reasons = json.loads(self._read(store, "decision", whole))
        with self._changed:
            self._decision = Decision(step, tuple(reasons))
            self._changed.notify_all()
        while self._is_held() and not self._stopping.wait(_PAUSE_SECONDS):
            pass
        return True

    def _is_held(self) -> bool:
        """Return whether the main thread has not yet reached the agreed step."""
        return self._gate is not None

    def _read(self, store: Store, key: str, whole: Store) -> str:
        """Wait for a key that another rank sets, and return its value.

        Raises:
            _EndedError: A rank has closed its end, so the key will not be set.
        """
        while not store.check([key]):
            # Check the key again after the end: a rank may set the key and then end.
            if self._stopping.is_set() or (whole.check([_ENDED]) and not store.check([key])):
                raise _EndedError
            time.sleep(_PAUSE_SECONDS)
        return store.get(key).decode()
