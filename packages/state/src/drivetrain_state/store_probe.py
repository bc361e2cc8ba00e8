"""Detect that the process that hosts the rendezvous store has ended, before torch does and logs pages about it."""

import socket
from contextlib import suppress

from torch.distributed import PrefixStore, Store, TCPStore


class StoreProbe:
    """An idle connection to the server of a TCPStore, which closes when the server ends; none for other stores.

    Raises:
        ConnectionError: If the server is already gone.
    """

    def __init__(self, store: Store) -> None:
        tcp = _underlying(store)
        self._socket = None
        if isinstance(tcp, TCPStore):
            self._socket = socket.create_connection((tcp.host, tcp.port), timeout=30)
            self._socket.setblocking(False)

    def check(self) -> None:
        """Check that the server is alive.

        Raises:
            ConnectionError: If the server has ended.
        """
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
    tcp = _underlying(store)
    return f"{tcp.host}:{tcp.port}" if isinstance(tcp, TCPStore) else type(tcp).__name__


def _underlying(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
