"""Notice that the process which hosts the rendezvous store has ended, before torch does and logs pages about it."""

import socket
from contextlib import suppress

from torch.distributed import PrefixStore, Store, TCPStore


class StoreProbe:
    """An idle connection to a TCPStore's server, which reads as ended once the server has; none to another store.

    Raises:
        ConnectionError: The server was gone already.
    """

    def __init__(self, store: Store) -> None:
        tcp = _underlying(store)
        self._socket = None
        if isinstance(tcp, TCPStore):
            self._socket = socket.create_connection((tcp.host, tcp.port), timeout=30)
            self._socket.setblocking(False)

    def check(self) -> None:
        """Do nothing while the server lives.

        Raises:
            ConnectionError: It has ended.
        """
        if self._socket is None:
            return
        with suppress(BlockingIOError):
            if self._socket.recv(1) == b"":
                raise ConnectionError("the process that hosts the rendezvous store has ended")

    def close(self) -> None:
        """Hang up."""
        if self._socket is not None:
            self._socket.close()


def store_address(store: Store) -> str:
    """Return `host:port` of the server behind a store; its type's name for one that is not reached over TCP."""
    tcp = _underlying(store)
    return f"{tcp.host}:{tcp.port}" if isinstance(tcp, TCPStore) else type(tcp).__name__


def _underlying(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
