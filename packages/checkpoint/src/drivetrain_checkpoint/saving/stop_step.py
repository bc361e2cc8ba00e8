"""Agree on one step among all ranks without a collective: signals and timers reach each rank at its own time."""

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Condition, Event, Thread
from typing import Any

from torch.distributed import DistError, Store

from drivetrain_checkpoint.errors import OtherRankFailedError
from drivetrain_state import Topology
from drivetrain_state.store_rounds import StoreRounds, wait

_POLL_SECONDS = 0.25  # while no rank asks for a step
_PAUSE_SECONDS = 0.01  # until this rank has reached the agreed step
_ENDED = "ended"


class AgreedStep:
    """The part of this rank in an agreement of all ranks on a step.

    Any rank may ask for an agreement. A thread on every rank then publishes the rank's next step, and holds the rank
    at that step until all ranks have published theirs. The ranks agree on the latest step. Until a rank asks, a step
    costs a lock and a comparison. After a rank has called `close`, there are no more agreements. Only the thread uses
    the store, which is None in one process.
    """

    def __init__(self, store: Store | None, *, topology: Topology, patience_seconds: float) -> None:
        self._topology = topology
        self._patience_seconds = patience_seconds  # the longest time to hold a rank
        self._changed = Condition()
        self._step = 0
        self._gate: int | None = None  # this rank's next step, while an agreement is under way
        self._decision: tuple[int, list[str]] | None = None  # the agreed step, and the reasons for it
        # No lock: signal handlers append to it, and must not block. One deque for good, so that no request is lost.
        self._asked: deque[str] = deque()
        self._stopping = Event()
        self._is_over = False  # a rank has closed its end
        self._thread: Thread | None = None
        if store is not None:
            self._thread = Thread(
                target=self._take_part, args=(store,), name="drivetrain agreed step", daemon=True
            )
            self._thread.start()

    def ask(self, reason: str) -> None:
        """Ask the ranks to agree on a step. May be called by a signal handler, on any rank."""
        self._asked.append(reason)

    def reached(self, step: int) -> list[str]:
        """Return the reasons for which ranks asked, if `step` is the agreed step; otherwise an empty list.

        Called on all ranks, by the main thread, once per step.

        Raises:
            OtherRankFailedError: A rank did not answer within `patience_seconds`.
        """
        if self._thread is None:
            return list(dict.fromkeys(self._take_requests()))
        with self._changed:
            self._step = step
            if self._gate is None or step < self._gate:
                return []
            is_settled = self._changed.wait_for(
                lambda: self._decision is not None or self._is_over, self._patience_seconds
            )
            if not is_settled:
                raise OtherRankFailedError(
                    f"the ranks did not agree on a step to save at within {self._patience_seconds:g} s: one of them "
                    "has ended, or does not take steps"
                )
            if self._decision is None or step < self._decision[0]:
                return []
            (_, reasons), self._gate, self._decision = self._decision, None, None
            return reasons

    def close(self) -> None:
        """Stop the thread and take part in no further agreement."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _take_part(self, store: Store) -> None:
        """Ask for agreements and take part in them, until a rank calls `close`."""
        number, goes_on, rounds = 0, True, StoreRounds(store, rank=self._topology.rank)
        try:
            while goes_on and not self._stopping.wait(_POLL_SECONDS):
                if self._asked:
                    rounds.ask(number)
                if rounds.newest() > number:
                    number += 1
                    goes_on = self._agree(rounds, number)
            rounds.count(_ENDED, add=1)
        except (DistError, OSError):
            pass  # the process that hosts the store is gone, and with it the run
        finally:
            rounds.close()
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _take_requests(self) -> list[str]:
        return [self._asked.popleft() for _ in range(len(self._asked))]

    def _agree(self, rounds: StoreRounds, number: int) -> bool:
        """Agree on a step and wait until this rank has reached it; return False if a rank has called `close`."""
        with self._changed:  # reached() holds the main thread at this step until the ranks have agreed
            self._gate = self._step + 1
        rounds.answer(number, (self._gate, self._take_requests()))

        def read_when_there(read: Callable[[], Any]) -> Any:
            return wait(read, while_=lambda: not self._stopping.is_set() and not rounds.count(_ENDED))

        if self._topology.is_main:
            gates: list[int] = []
            reasons: list[str] = []
            for rank in range(self._topology.world_size):
                answer = read_when_there(partial(rounds.answer_of, number, rank))
                if answer is None:
                    return False
                gates.append(answer[0])
                reasons.extend(answer[1])
            rounds.conclude(number, (max(gates), list(dict.fromkeys(reasons))))
        if (decision := read_when_there(partial(rounds.conclusion, number))) is None:
            return False
        with self._changed:
            self._decision = decision
            self._changed.notify_all()
        # reached() opens the gate when the main thread is at the agreed step.
        while self._gate is not None and not self._stopping.wait(_PAUSE_SECONDS):  # pyright: ignore[reportUnnecessaryComparison]
            pass
        return True
