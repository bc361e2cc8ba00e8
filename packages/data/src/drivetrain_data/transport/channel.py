"""A channel that carries messages from a group's first rank to its other ranks, in the same order on all of them."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from drivetrain_data.transport.message import Bytes, Outgoing
from drivetrain_data.transport.scatter import ScatterChannel, transport_device
from drivetrain_data.transport.shared_memory import meet


class Channel(Protocol):
    """A channel from the first rank of a group to the other ranks."""

    name: str

    def send(self, messages: Sequence[Outgoing], *, complete: bool) -> None:
        """Start sending a message to each other rank of the group, in rank order. Called on the first rank.

        All parts are under way on return if `complete`; else the rest may wait for the next call.
        """
        ...

    def expect(self) -> None:
        """Announce that `receive` follows, so that receiving can start early. Called on the other ranks."""
        ...

    def receive(self) -> Bytes:
        """Return the next message, in memory that the caller owns. Called on the other ranks."""
        ...

    def settle(self) -> None:
        """Finish sending the last message, or receiving an announced one. Called on all ranks."""
        ...


def open_channel(group: dist.ProcessGroup, device: torch.device | None) -> Channel:
    """Open shared memory if all ranks run on one Linux machine, else a scatter on the CPU or, if it cannot, `device`.

    Called on all ranks of the group.
    """
    return meet(group) or ScatterChannel(group, transport_device(group, device))
