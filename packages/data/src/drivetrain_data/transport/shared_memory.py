"""A channel on one machine, through memory that the sender shares with each receiver.

Each receiver has two slots, written in turn. Over a socket, the sender announces which slot holds a message, and the
receiver replies once it has copied the message. Slots and sockets have no names in the file system: a killed process
leaves nothing behind, and the processes that wait for it notice its exit.
"""

import os
import socket
import struct
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from mmap import mmap
from pathlib import Path

import numpy as np
import torch.distributed as dist

from drivetrain_data.errors import DispatchError
from drivetrain_data.transport.message import Bytes, Outgoing

# The slot, the bytes of its message, and whether a descriptor of new memory for the slot is attached.
_NOTICE = struct.Struct("=qq?")
_RANK = struct.Struct("=q")
_COPIED = b"."
_SMALLEST_SLOT = 2**16


class SharedMemoryChannel:
    """A channel of two slots and a socket for each receiver. Create it with `meet`."""

    name = "shared memory"

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self._lines = {rank: _Line(rank, connection) for rank, connection in connections.items()}
        self._is_expected = False
        weakref.finalize(self, _close, list(connections.values()))

    def send(self, messages: Sequence[Outgoing], *, complete: bool) -> None:
        """Write each message to a slot of its rank, after the receiver has copied the slot's last message."""
        del complete  # sending is always complete
        for rank, line in self._lines.items():
            line.send(messages[rank - 1])

    def expect(self) -> None:
        """Record that a call of `receive` follows; the sender does not wait for this call."""
        self._is_expected = True

    def receive(self) -> Bytes:
        """Return a copy of the next message; DispatchError if the sender has exited."""
        self._is_expected = False
        return self._lines[0].receive()

    def settle(self) -> None:
        """Receive and drop a message that was expected and not yet received."""
        if self._is_expected:
            self.receive()


class _Line:
    """The connection between the sender and a receiver, with its two slots, as seen from either side."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self._rank = rank
        self._connection = connection
        self._slots: list[Bytes] = [np.empty(0, dtype=np.uint8)] * 2
        self._turn = 0
        self._num_in_use = 0

    def send(self, message: Outgoing) -> None:
        slot, self._turn = self._turn, 1 - self._turn
        try:
            if self._num_in_use == len(self._slots):
                if self._connection.recv(len(_COPIED)) != _COPIED:
                    raise self._end_error()
                self._num_in_use -= 1
            self._num_in_use += 1
            if message.used <= len(self._slots[slot]):
                message.write(self._slots[slot], longest=message.used)
                self._connection.send(_NOTICE.pack(slot, message.used, False))
                return
            descriptor = os.memfd_create("drivetrain-batches")
            try:
                os.ftruncate(descriptor, max(_SMALLEST_SLOT, message.used + message.used // 4))
                self._slots[slot] = _map(descriptor)
                message.write(self._slots[slot], longest=message.used)
                socket.send_fds(self._connection, [_NOTICE.pack(slot, message.used, True)], [descriptor])
            finally:
                os.close(descriptor)
        except (BrokenPipeError, ConnectionResetError):
            raise self._end_error() from None

    def receive(self) -> Bytes:
        try:
            notice, descriptors, _, _ = socket.recv_fds(self._connection, _NOTICE.size, 1)
        except ConnectionResetError:  # the sender exited with unread replies; its notices can still be read
            notice, descriptors, _, _ = socket.recv_fds(self._connection, _NOTICE.size, 1)
        if not notice:
            raise self._end_error()
        slot, used, is_new = _NOTICE.unpack(notice)
        if is_new:
            self._slots[slot] = _map(descriptors[0])
            os.close(descriptors[0])
        message = self._slots[slot][:used].copy()
        with suppress(BrokenPipeError, ConnectionResetError):  # the sender may have exited meanwhile
            self._connection.send(_COPIED)
        return message

    def _end_error(self) -> DispatchError:
        who = "that is handed batches" if self._rank else "that reads for all"
        return DispatchError(
            f"the process {who} has ended, rank {self._rank} of the group; see its own output"
        )


def meet(group: dist.ProcessGroup) -> SharedMemoryChannel | None:
    """Connect a group's first rank to the others; None if impossible. Called on all ranks of the group."""
    num_ranks = dist.get_world_size(group)
    is_sender = dist.get_rank(group) == 0
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        listener = _listen(Path(folder) / "meet", num_ranks) if is_sender else None
        place: list[str | None] = [None if listener is None else listener.getsockname()]
        dist.broadcast_object_list(place, dist.get_global_rank(group, 0), group=group)
        # Receivers connect before the sender accepts: the listener's backlog has room for all of them.
        connections = {} if is_sender else _connect(place[0], dist.get_rank(group))
        reached: list[bool | None] = [None] * num_ranks
        dist.all_gather_object(reached, is_sender or bool(connections), group=group)
        if listener is not None:
            for _ in range(sum(map(bool, reached)) - 1):
                connection, _ = listener.accept()
                connections[_RANK.unpack(connection.recv(_RANK.size))[0]] = connection
            listener.close()
    if place[0] is not None and all(reached):
        return SharedMemoryChannel(connections)
    _close(list(connections.values()))
    return None


def _listen(path: Path, backlog: int) -> socket.socket | None:
    """Return a socket that only this user's processes on this machine can reach; None if impossible."""
    if not hasattr(os, "memfd_create"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
    except OSError:  # the path is too long, or the file system does not support sockets
        listener.close()
        return None
    listener.listen(backlog)
    return listener


def _connect(place: str | None, rank: int) -> dict[int, socket.socket]:
    """Connect to the first rank and send it this rank's number; return {} if it is on another machine."""
    if place is None:
        return {}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(place)
    except OSError:
        connection.close()
        return {}
    connection.send(_RANK.pack(rank))
    return {0: connection}


def _map(descriptor: int) -> Bytes:
    return np.frombuffer(mmap(descriptor, os.fstat(descriptor).st_size), dtype=np.uint8)


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
