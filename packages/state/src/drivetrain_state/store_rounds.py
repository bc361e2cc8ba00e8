"""Rounds of answers among the ranks, through keys of the store that all of them reach.

Background threads use rounds instead of collectives, since collectives of two threads could deadlock across ranks. A
round is one question to all ranks, numbered from 1: every rank answers, and one rank concludes. Values are JSON. One
rank writes a value, and the others may see it a moment later. Only `wait` waits for a rank. Ranks exchange only
durations, so that the clocks of their hosts need not agree.
"""

import json
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import sleep
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

Value = TypeVar("Value")

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.2  # thousands of ranks may wait at one store


class StoreRounds:
    """A rank's client for the rounds under one prefix of a store. Not thread-safe.

    The store is a connection from `control_store` that no other thread uses. If the store is gone, every method
    raises ConnectionError or a `torch.distributed.DistError`.
    """

    def __init__(self, store: Store, *, rank: int) -> None:
        self.rank = rank
        self._store = store
        self._probe: StoreProbe | None = None

    def newest(self) -> int:
        """Return the number of the newest round, 0 for none. Ranks poll this between rounds."""
        self._check_host()
        return self.count("rounds")

    def ask(self, after: int) -> None:
        """Begin a round, unless another rank has begun one since round `after`."""
        if self.count(f"asked/{after + 1}", add=1) == 1:
            self.count("rounds", add=1)

    def answer(self, number: int, value: object) -> None:
        """Publish this rank's answer to a round, and delete its answer to round `number` - 2."""
        self.post(f"answer/{number}/{self.rank}", value)
        # Another rank may be reading the answer to the previous round: if that went after its `check`, its `get`
        # would wait for the store's timeout.
        self.delete(f"answer/{number - 2}/{self.rank}")

    def answer_of(self, number: int, rank: int) -> Any:
        """Return the answer of a rank to a round, or None before it has answered."""
        return self.read(f"answer/{number}/{rank}")

    def answers(self, number: int, ranks: Iterable[int]) -> dict[int, Any]:
        """Return the answers of `ranks` to a round that have arrived so far."""
        found = {rank: self.answer_of(number, rank) for rank in ranks}
        return {rank: value for rank, value in found.items() if value is not None}

    def conclude(self, number: int, value: object) -> None:
        """Publish the conclusion of a round, on one rank."""
        self.post(f"conclusion/{number}", value)

    def conclusion(self, number: int) -> Any:
        """Return the conclusion of a round, or None before it is published."""
        return self.read(f"conclusion/{number}")

    def arrive(self) -> None:
        """Withdraw the departure that an earlier client of this rank has published."""
        self.delete(f"departure/{self.rank}")

    def depart(self, ending: str) -> None:
        """Publish how this rank ended, to explain its later silence."""
        self._check_host()
        self.post(f"departure/{self.rank}", ending)

    def departures(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the endings of those `ranks` that have called `depart`."""
        found = {rank: self.read(f"departure/{rank}") for rank in ranks}
        return {rank: ending for rank, ending in found.items() if ending is not None}

    def forget(self, number: int, ranks: Iterable[int]) -> None:
        """Delete the answers and the conclusion of a round, on one rank, once no rank reads them any more."""
        self.delete(f"conclusion/{number}", *(f"answer/{number}/{rank}" for rank in ranks))

    def post(self, key: str, value: object) -> None:
        """Publish a value, not None, under a key."""
        self._store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """Return the value under a key, or None if there is none."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def count(self, key: str, *, add: int = 0) -> int:
        """Add to a counter, which begins at 0, and return it."""
        return self._store.add(key, add)

    def delete(self, *keys: str) -> None:
        """Delete values and counters, whether they exist or not."""
        for key in keys:
            self._store.delete_key(key)

    def close(self) -> None:
        """Close the connection by which this client notices that the store's host has ended."""
        if self._probe is not None:
            self._probe.close()

    def _check_host(self) -> None:
        self._probe = self._probe or StoreProbe(self._store)
        self._probe.check()  # torch would log pages about a host that has ended


def wait(read: Callable[[], Value | None], *, while_: Callable[[], bool]) -> Value | None:
    """Poll until `read` returns a value or `while_` returns False; return the value, or None without a value."""
    pause_seconds = _FIRST_PAUSE_SECONDS
    while (value := read()) is None:
        if not while_():
            return read()  # once more: it may have come in between
        sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
    return value


class StoreProbe:
    """An idle connection to a TCPStore's server, which closes when the server ends; none for other stores."""

    def __init__(self, store: Store) -> None:
        tcp = underlying_store(store)
        self._socket = None
        if isinstance(tcp, TCPStore):
            self._socket = socket.create_connection((tcp.host, tcp.port), timeout=30)
            self._socket.setblocking(False)

    def check(self) -> None:
        """Raise ConnectionError if the server has ended."""
        if self._socket is None:
            return
        with suppress(BlockingIOError):
            if self._socket.recv(1) == b"":
                raise ConnectionError("the process that hosts the rendezvous store has ended")

    def close(self) -> None:
        """Close the idle connection."""
        if self._socket is not None:
            self._socket.close()


def store_address(store: Store) -> str:
    """Return `host:port` of the server of a store, or the type's name if the store is not a TCPStore."""
    tcp = underlying_store(store)
    return f"{tcp.host}:{tcp.port}" if isinstance(tcp, TCPStore) else type(tcp).__name__


def underlying_store(store: Store) -> Store:
    """Return the store beneath all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
