import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread

import pytest
from torch.distributed import TCPStore

from drivetrain_launcher.membership.bounded_store import BoundedStore, StoreGoneError, StoreSilentError


class Wire:
    """A store behind a wire that can be cut, as by a host that is frozen, or closed, as by one that died."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store.set("key", "value")
        self.is_cut = Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = [self._listener]
        self._threads = [Thread(target=self._accept)]
        self._threads[0].start()

    def connected(self) -> BoundedStore:
        """Connect through the wire."""
        port = self._listener.getsockname()[1]
        patience = timedelta(seconds=30)
        return BoundedStore(
            lambda: TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)
        )

    def close(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            near = self._listener.accept()[0]
            far = socket.create_connection(("127.0.0.1", self.store.port))
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                self._threads.append(Thread(target=self._pass_on, args=(source, sink)))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.is_cut.is_set():
                    sink.sendall(data)


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def test_a_call_to_a_silent_host_ends_in_time_and_the_next_one_at_once(wire: Wire) -> None:
    store = wire.connected()
    assert store.call(lambda tcp: tcp.get("key"), seconds=60) == b"value"
    wire.is_cut.set()
    began = time.monotonic()
    with pytest.raises(StoreSilentError, match=r"no answer within 0\.5 s"):
        store.call(lambda tcp: tcp.get("key"), seconds=0.5)
    with pytest.raises(StoreSilentError, match="no answer to an earlier call"):
        store.call(lambda tcp: tcp.get("key"), seconds=100)
    assert time.monotonic() - began < 60
    store.close()


def test_a_host_that_is_gone_is_told_from_a_silent_one(wire: Wire) -> None:
    store = wire.connected()
    assert store.call(lambda tcp: tcp.check(["key"]), seconds=60)
    wire.close()
    with pytest.raises(StoreGoneError):
        store.call(lambda tcp: tcp.get("key"), seconds=60)
    store.close()


def test_a_wait_that_ends_leaves_the_connection_usable(wire: Wire) -> None:
    store = wire.connected()
    with pytest.raises(StoreSilentError):
        store.call(lambda tcp: tcp.wait(["none"], timedelta(milliseconds=50)), seconds=60)
    assert store.call(lambda tcp: tcp.get("key"), seconds=60) == b"value"
    store.close()
