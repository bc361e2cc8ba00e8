"""Messages from a group's first rank to each of its ranks, in the same order on all of them."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from drivetrain_data.transport.message import Bytes, Outgoing
from drivetrain_data.transport.scatter import ScatterChannel, transport_device
from drivetrain_data.transport.shared_memory import meet


class Channel(Protocol):
    """What a way of sending gives.

    Attributes:
        name: What it is, as a phrase for people.
    """

    name: str

    def send(self, messages: Sequence[Outgoing], *, complete: bool) -> None:
        """Start sending. Called on the first rank.

        Args:
            messages: One for each other rank of the group, in rank order.
            complete: Have all of it under way on return, and not only at the next call.
        """
        ...

    def expect(self) -> None:
        """Say that a message will be received, and start where that helps. Called on the other ranks."""
        ...

    def receive(self) -> Bytes:
        """The next message, in memory that is the caller's. Called on the other ranks."""
        ...

    def settle(self) -> None:
        """Finish what was started: the sender's last message, and one that was expected. Called on all ranks."""
        ...


def open_channel(group: dist.ProcessGroup, device: torch.device | None) -> Channel:
    """Shared memory where all ranks run on one Linux machine, else a collective. Called on all ranks of the group.

    Args:
        group: The ranks.
        device: What they communicate on, if it cannot be the CPU.
    """
    return meet(group) or ScatterChannel(group, transport_device(group, device))
