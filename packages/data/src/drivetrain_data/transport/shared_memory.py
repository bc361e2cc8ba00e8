"""Messages on one machine, through memory that the sender shares with each receiver.

A receiver has two slots, written in turn. Over a socket the sender says which of them holds a message, and the
receiver answers when it has copied it. Neither slots nor sockets have a name in the file system, so that nothing is
left behind by a process that is killed, and the end of a process is noticed by those that wait for it.
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

_NOTICE = struct.Struct("=qq?")  # the slot, the bytes of its message, whether its memory comes along
_RANK = struct.Struct("=q")
_COPIED = b"."
_SMALLEST_SLOT = 2**16


class SharedMemoryChannel:
    """Two slots and a socket for each receiver. `meet` makes it.

    Args:
        connections: The sockets to the other ranks, by rank; on a receiver that to the sender alone, as rank 0.
    """

    name = "shared memory"

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self._lines = {rank: _Line(rank, connection) for rank, connection in connections.items()}
        self._is_expected = False
        weakref.finalize(self, _close, list(connections.values()))

    def send(self, messages: Sequence[Outgoing], *, complete: bool) -> None:
        """Write each message where its rank finds it; wait for a slot whose message was not copied yet."""
        del complete  # it always is
        for rank, line in self._lines.items():
            line.send(messages[rank - 1])

    def expect(self) -> None:
        """The sender needs no receiver to start with."""
        self._is_expected = True

    def receive(self) -> Bytes:
        """The next message, copied.

        Raises:
            DispatchError: The sender has ended.
        """
        self._is_expected = False
        return self._lines[0].receive()

    def settle(self) -> None:
        """Take a message that was expected."""
        if self._is_expected:
            self.receive()


class _Line:
    """The two slots between the sender and a receiver, as either of them sees it."""

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
                self._wait_until_copied()
            self._num_in_use += 1
            if message.used <= len(self._slots[slot]):
                message.write(self._slots[slot], longest=message.used)
                self._connection.send(_NOTICE.pack(slot, message.used, False))
            else:
                self._send_in_new_memory(slot, message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None

    def _wait_until_copied(self) -> None:
        if self._connection.recv(len(_COPIED)) != _COPIED:
            raise self._ended()
        self._num_in_use -= 1

    def _send_in_new_memory(self, slot: int, message: Outgoing) -> None:
        descriptor = os.memfd_create("drivetrain-batches")
        try:
            os.ftruncate(descriptor, max(_SMALLEST_SLOT, message.used + message.used // 4))
            self._slots[slot] = _mapped(descriptor)
            message.write(self._slots[slot], longest=message.used)
            socket.send_fds(self._connection, [_NOTICE.pack(slot, message.used, True)], [descriptor])
        finally:
            os.close(descriptor)

    def receive(self) -> Bytes:
        slot, used, is_new, descriptors = self._next_notice()
        if is_new:
            self._slots[slot] = _mapped(descriptors[0])
            os.close(descriptors[0])
        message = self._slots[slot][:used].copy()
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have ended after its last message
            self._connection.send(_COPIED)
        return message

    def _next_notice(self) -> tuple[int, int, bool, list[int]]:
        try:
            notice, descriptors, _, _ = socket.recv_fds(self._connection, _NOTICE.size, 1)
        except ConnectionResetError:  # it left answers unread; what it had sent before can still be received
            notice, descriptors, _, _ = socket.recv_fds(self._connection, _NOTICE.size, 1)
        if not notice:
            raise self._ended()
        return *_NOTICE.unpack(notice), descriptors

    def _ended(self) -> DispatchError:
        who = "that is handed batches" if self._rank else "that reads for all"
        return DispatchError(
            f"the process {who} has ended, rank {self._rank} of the group; see its own output"
        )


def meet(group: dist.ProcessGroup) -> SharedMemoryChannel | None:
    """Connect the first rank of a group to the others; None if one of them cannot be reached so.

    Called on all ranks of the group.
    """
    num_ranks = dist.get_world_size(group)
    is_sender = dist.get_rank(group) == 0
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        listener = _listen(Path(folder) / "meet", num_ranks) if is_sender else None
        place: list[str | None] = [None if listener is None else listener.getsockname()]
        dist.broadcast_object_list(place, dist.get_global_rank(group, 0), group=group)
        connections = {} if is_sender else _connected(place[0], dist.get_rank(group))
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
    """A socket that ranks on this machine can reach, and no other user; None where there is none."""
    if not hasattr(os, "memfd_create"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
    except OSError:  # a path that is too long, or a file system without sockets: not reachable so
        listener.close()
        return None
    listener.listen(backlog)
    return listener


def _connected(place: str | None, rank: int) -> dict[int, socket.socket]:
    """A connection to the first rank, which is told who connects; none if it is on another machine."""
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


def _mapped(descriptor: int) -> Bytes:
    return np.frombuffer(mmap(descriptor, os.fstat(descriptor).st_size), dtype=np.uint8)


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
