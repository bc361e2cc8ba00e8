"""A node's part in an elastic run: send signs of life to the leader, and read its decisions."""

import time
from collections.abc import Callable
from dataclasses import replace
from threading import Condition, Event, Thread
from typing import Any, TypeVar

from torch.distributed import TCPStore

from drivetrain_launcher.membership.bounded_store import BoundedStore, StoreGoneError, StoreSilentError
from drivetrain_launcher.membership.elastic_state import ElasticState, Leave, MemberNode, NodeStatus

Result = TypeVar("Result")

# The keys of the store: the name of the run, the number of its newest state, each state by its number, the number of
# nodes that came, and two for each node. Nodes poll the small number and read a state once, so that the traffic grows
# with the nodes, not with their square.
RUN_KEY = "drivetrain/run"
STATE_NUMBER_KEY = "drivetrain/state_number"
STATE_KEY = "drivetrain/state/"
ARRIVED_KEY = "drivetrain/arrived"
NODE_KEY = "drivetrain/node/"
STATUS_KEY = "drivetrain/status/"
# The fraction of the silence that ends a membership after which a node says again that it is alive.
_BEATS_IN_A_SILENCE = 12
_LONGEST_BEAT_SECONDS = 0.5
# A node that was frozen for this fraction of that silence may have been given up: its ranks end before anything else.
_FENCED_FRACTION = 0.8


class RunOverError(RuntimeError):
    """The run is over for this node; the message says why, and `exit_code` is for the shell."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RoundOverError(RuntimeError):
    """The round ended while this node waited in it for other nodes; the node gets ready for the next round."""


class Member:
    """A node that takes part in a run, with a thread that speaks to the store until `close`.

    After `silence_seconds` without an answer the node gives up on the store's host; `place` is its address. The
    thread calls `fence`, which ends the ranks at once, after the node was frozen for so long that the other nodes may
    have gone on without it.

    Attributes:
        state: The state of the run, as this node knows it.
        status: The status that this node sends.
        was_frozen: Whether the ranks were ended because this node froze; false again once it is ready.
    """

    def __init__(
        self,
        store: BoundedStore,
        node: MemberNode,
        *,
        silence_seconds: float,
        place: str,
        fence: Callable[[], None],
    ) -> None:
        self.node = node
        self._store = store
        self._silence_seconds = silence_seconds
        self._place = place
        self._fence = fence
        self.status = NodeStatus()
        self.state = ElasticState()
        self._state_number = b""
        self._lost = ""
        self.was_frozen = False
        self._changed = Condition()
        self._now = Event()
        self._ended = False
        self._thread = Thread(target=self._live, name="elastic member", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """True if the host of the store does not answer."""
        return bool(self._lost)

    def check(self) -> None:
        """Raise RunOverError if the run is over, or the host of its store is silent or gone."""
        if self.state.closed:
            raise RunOverError(self.state.closed, exit_code=self.state.exit_code)
        if self._lost:
            raise RunOverError(self._lost, exit_code=1)

    def ready_for_next(self) -> None:
        """Report that the ranks of this node are stopped, and the node is ready for the next round."""
        self.was_frozen = False
        self._tell(ready=self.state.round + 1, finished=0)

    def finished(self, number: int) -> None:
        """Say that the ranks of this node have ended well in a round."""
        self._tell(finished=number)

    def leave(self, how: Leave, exit_code: int) -> None:
        """Report that this node leaves, and how; later calls change nothing."""
        if not self.status.left:
            self._tell(left=how, exit_code=exit_code)

    def call(self, function: Callable[[TCPStore], Result]) -> Result:
        """Call a function with the store; raise RunOverError if it does not answer in time, or the run is over."""
        try:
            return self._store.call(function, seconds=self._silence_seconds)
        except (StoreSilentError, StoreGoneError) as error:
            self._give_up(error)
            self.check()
            raise

    def wait(self, seconds: float) -> None:
        """Wait until the state of the run changes, for some seconds at most."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self, *, seconds: float) -> None:
        """Send this node's status a last time, then end the thread."""
        self._ended = True
        self._now.set()
        self._thread.join(seconds)
        self._store.close()

    def _tell(self, **changes: Any) -> None:
        with self._changed:
            self.status = replace(self.status, **changes)
        self._now.set()

    def _live(self) -> None:
        interval = min(_LONGEST_BEAT_SECONDS, self._silence_seconds / _BEATS_IN_A_SILENCE)
        while not self._lost:
            is_last, began = self._ended, time.monotonic()
            try:
                self._beat()
            except (StoreSilentError, StoreGoneError) as error:
                self._give_up(error)
                return
            if is_last:
                return
            self._end_ranks_after(time.monotonic() - began, limit=self._silence_seconds)
            waiting = time.monotonic()
            self._now.wait(interval)
            self._now.clear()
            self._end_ranks_after(time.monotonic() - waiting, limit=self._silence_seconds * _FENCED_FRACTION)

    def _end_ranks_after(self, seconds: float, *, limit: float) -> None:
        """End the ranks if this process stood still for so long that the others may have gone on without it."""
        if seconds > limit and len(self.state.members) > 1 and not self._ended:
            self.was_frozen = True
            self._fence()

    def _beat(self) -> None:
        with self._changed:
            self.status = replace(self.status, count=self.status.count + 1)
            text = self.status.to_json()

        def exchange(store: TCPStore) -> tuple[bytes, bytes]:
            store.set(f"{STATUS_KEY}{self.node.number}", text)
            number = store.get(STATE_NUMBER_KEY)
            is_new = number != self._state_number
            return number, store.get(f"{STATE_KEY}{number.decode()}") if is_new else b""

        number, news = self._store.call(exchange, seconds=self._silence_seconds)
        if news:
            state = ElasticState.from_json(news)
            with self._changed:
                self.state, self._state_number = state, number
                self.status = replace(self.status, has_seen_end=bool(state.closed))
                self._changed.notify_all()
            self._now.set()

    def _give_up(self, error: StoreSilentError | StoreGoneError) -> None:
        if self.state.closed or self._ended or self._lost:
            self._lost = self._lost or self.state.closed or "ended"
            return
        how = (
            f"has been silent for {self._silence_seconds:g} s"
            if isinstance(error, StoreSilentError)
            else "has closed its connection"
        )
        with self._changed:
            self._lost = (
                f"the host of the store of this run ({self._place}) {how}: the run is over on this node; start the "
                "launcher again here to take part again, or on every node if that host is down"
            )
            self._changed.notify_all()
