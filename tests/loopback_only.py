"""A fixture that fails a test on the first connection to another machine."""

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse connections of this process to all but the loopback and sockets in files."""
    refused: list[object] = []
    connect = socket.socket.connect

    def checked(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            refused.append(address)
            raise ConnectionRefusedError(f"a test connects to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", checked)
    yield
    assert not refused, f"connections to other machines: {refused}"
