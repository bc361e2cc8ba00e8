"""One step that all ranks agree on, found without a collective: signals and clocks reach each at its own moment."""

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Event, Thread

from torch.distributed import DistError, PrefixStore, Store

from drivetrain_checkpoint.errors import OtherRankFailedError

_POLL_SECONDS = 0.25  # while nobody asks
_PAUSE_SECONDS = 0.01  # while somebody does
_ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Decision:
    """What was agreed.

    Attributes:
        step: The step that all ranks reach and none has passed.
        reasons: What ranks asked for it by, such as `"SIGTERM"`.
    """

    step: int
    reasons: tuple[str, ...]


class _EndedError(Exception):
    """This rank, or another, takes no steps any more."""


class AgreedStep:
    """Each rank's end of the agreement.

    Any rank may ask. A thread on every rank then tells the rank's next step and holds the rank there until all have
    told theirs; the latest of them is agreed. Until somebody asks, a step costs a lock and a comparison. Once a rank
    has closed its end, nothing is agreed any more.

    Args:
        store: A connection to the store that all ranks share, for this object's thread alone; None in one process.
        rank: This rank.
        world_size: How many there are.
        patience_seconds: How long a rank is held at most.
    """

    def __init__(self, store: Store | None, *, rank: int, world_size: int, patience_seconds: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._patience_seconds = patience_seconds
        self._changed = Condition()
        self._step = 0
        self._gate: int | None = None
        self._decision: Decision | None = None
        self._asked: list[str] = []  # appended to by signal handlers: nothing there may wait
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
        """The decision, if this is the step that was agreed. Called by the main thread of all ranks at each step.

        Raises:
            OtherRankFailedError: A rank did not answer.
        """
        if self._thread is None:
            asked, self._asked = self._asked, []
            return Decision(step, tuple(dict.fromkeys(asked))) if asked else None
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
        """End the thread."""
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
            pass  # the store's host is gone, and with it the run
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _take_turn(self, store: Store, whole: Store) -> bool:
        """Ask if this rank wants to; answer if any has asked. Whether a decision was made, and reached."""
        if self._asked:
            asked, self._asked = self._asked, []
            for reason in asked:
                store.set(f"reason/{store.add('reasons', 1)}", reason)
        if not store.add("reasons", 0):
            return False
        with self._changed:
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
            pass  # until the main thread has reached the step
        return True

    def _is_held(self) -> bool:
        """Whether the main thread has not reached the step that was agreed."""
        return self._gate is not None

    def _read(self, store: Store, key: str, whole: Store) -> str:
        """What another rank says, once it has.

        Raises:
            _EndedError: A rank has closed its end, so that this is not said any more.
        """
        while not store.check([key]):
            if self._stopping.is_set() or (whole.check([_ENDED]) and not store.check([key])):
                raise _EndedError
            time.sleep(_PAUSE_SECONDS)
        return store.get(key).decode()
