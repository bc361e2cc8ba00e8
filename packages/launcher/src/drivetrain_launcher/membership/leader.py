"""The leader of an elastic run: the node that hosts the store watches the others and begins each round."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import TypeVar

from torch.distributed import TCPStore

from drivetrain_launcher.membership.bounded_store import BoundedStore
from drivetrain_launcher.membership.decision import Limits, Peer, decide
from drivetrain_launcher.membership.elastic_state import ElasticState, MemberNode, NodeStatus
from drivetrain_launcher.membership.member import (
    ARRIVED_KEY,
    NODE_KEY,
    STATE_KEY,
    STATE_NUMBER_KEY,
    STATUS_KEY,
)
from drivetrain_state.store_server import host_store

Result = TypeVar("Result")

_LOOKS_IN_A_SILENCE = 20
_LONGEST_LOOK_SECONDS = 0.3
_KEPT_STATES = 100
_CALL_SECONDS = 60.0  # to the store in this process


class Leader:
    """A thread that reads the status of all nodes, and writes the state of the run.

    A node is lost when its status has not changed for `limits.silence_seconds` of this machine's clock: clocks of
    different machines are never compared. `address` is this host's, where the ranks find their store.
    """

    def __init__(self, connect: Callable[[], TCPStore], *, address: str, limits: Limits) -> None:
        self._store = BoundedStore(connect)
        self._address = address
        self._limits = limits
        self._state = ElasticState()
        self._state_number = 0
        self._nodes: dict[int, MemberNode] = {}
        self._statuses: dict[int, NodeStatus] = {}
        self._seen: dict[int, float] = {}
        self._began = self._quiet_since = time.monotonic()
        self._ranks_store: TCPStore | None = None
        self._write(self._state)
        self._thread = Thread(target=self._lead, name="elastic leader", daemon=True)
        self._thread.start()

    def wait_until_told(self) -> None:
        """Wait until the run is over and every node that is alive knows of the end."""
        self._thread.join()

    def _lead(self) -> None:
        interval = min(_LONGEST_LOOK_SECONDS, self._limits.silence_seconds / _LOOKS_IN_A_SILENCE)
        before = time.monotonic()
        while True:
            now = time.monotonic()
            if self._state.closed and all(
                peer.status.has_seen_end
                or peer.status.left
                or peer.silent_seconds > self._limits.silence_seconds
                for peer in self._peers(now)
            ):
                return
            time.sleep(interval)
            now = time.monotonic()
            if now - before > self._limits.silence_seconds / 2:
                # This process stood still, and does not know who was silent meanwhile: all get their time again.
                self._seen = dict.fromkeys(self._seen, now)
            before = now
            self._look()
            self._decide()

    def _look(self) -> None:
        """Read which nodes have arrived, and the status of every node."""
        now = time.monotonic()

        def find_new(store: TCPStore) -> dict[int, bytes]:
            """Return the new nodes that have registered; a node may have ended before it registered."""
            numbers = {*range(1, store.add(ARRIVED_KEY, 0) + 1)} - self._nodes.keys()
            keys = {number: [f"{NODE_KEY}{number}", f"{STATUS_KEY}{number}"] for number in numbers}
            return {number: store.get(pair[0]) for number, pair in keys.items() if store.check(pair)}

        for number, text in self._call(find_new).items():
            self._nodes[number] = MemberNode.from_json(text)
            self._statuses[number], self._seen[number] = NodeStatus(), now
            self._quiet_since = now
        numbers = sorted(self._nodes)
        if not numbers:
            return
        texts = self._call(lambda store: store.multi_get([f"{STATUS_KEY}{number}" for number in numbers]))
        for number, text in zip(numbers, texts, strict=True):
            status = NodeStatus.from_json(text)
            if status != self._statuses[number]:
                self._statuses[number], self._seen[number] = status, now

    def _decide(self) -> None:
        now = time.monotonic()
        state = decide(
            self._state,
            self._peers(now),
            self._limits,
            gathering_seconds=now - self._began,
            quiet_seconds=now - self._quiet_since,
        )
        if state == self._state:
            return
        if state.round > self._state.round:
            # A new store for each round: ranks of an earlier one, on a host that was frozen, reach nothing any more.
            self._ranks_store = host_store(self._address, 0, timeout=timedelta(seconds=60), is_one_node=False)
            state = replace(state, ranks_port=self._ranks_store.port)
        elif state.is_over and not self._state.is_over:
            self._began = now
        self._write(state)
        self._state = state

    def _peers(self, now: float) -> list[Peer]:
        return [
            Peer(node=node, status=self._statuses[number], silent_seconds=now - self._seen[number])
            for number, node in sorted(self._nodes.items())
        ]

    def _write(self, state: ElasticState) -> None:
        text = state.to_json()
        self._state_number += 1
        key, number = f"{STATE_KEY}{self._state_number}", str(self._state_number)
        old = f"{STATE_KEY}{self._state_number - _KEPT_STATES}"  # nobody reads it: nodes ask for the newest
        self._call(
            lambda store: (store.set(key, text), store.set(STATE_NUMBER_KEY, number), store.delete_key(old))
        )

    def _call(self, function: Callable[[TCPStore], Result]) -> Result:
        return self._store.call(function, seconds=_CALL_SECONDS)
