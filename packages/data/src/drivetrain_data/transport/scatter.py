"""Messages by a collective of the group, which reaches ranks on other machines too."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from drivetrain_data.transport.message import HEADER_BYTES, Bytes, Outgoing, longest_bytes

_FIRST_BYTES = 4096


class ScatterChannel:
    """One scatter a message, of a size that every rank knows; a second one if a message has outgrown it.

    Args:
        group: The ranks.
        device: What they communicate on.
    """

    name = "a scatter"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._num_ranks = dist.get_world_size(group)
        self._source = dist.get_global_rank(group, 0)
        self._capacity = _FIRST_BYTES  # the bytes of the first scatter of the next message
        # Two, written in turn: one is on its way while the other is filled.
        self._rows = [torch.empty((0, 0), dtype=torch.uint8)] * 2
        self._under_way: list[Any] = []
        # gloo's thread lets go of a tensor after wait() has returned. If its was the last hold, it would need the
        # interpreter, and abort the process where that is ending: so what was sent or received last is held here.
        self._held: list[list[torch.Tensor]] = []
        self._rest: tuple[torch.Tensor, int] | None = None
        self._expected: tuple[Any, torch.Tensor] | None = None

    def send(self, messages: Sequence[Outgoing], *, complete: bool) -> None:
        """Start sending. Called on the first rank.

        Args:
            messages: One for each other rank, in rank order.
            complete: Send what goes beyond the first scatter at once, and not only at the next call.
        """
        self._send_rest()
        before, self._under_way = self._under_way, []
        longest = max(message.used for message in messages)
        rows = self._write(messages, longest).to(self._device)
        self._start(rows[:, : self._capacity])
        self._rest = (rows, longest)
        if complete:
            self._send_rest()
        for work in before:
            work.wait()

    def settle(self) -> None:
        """Finish what was started: the reader waits for its last message, others take one they expected."""
        if self._expected is not None:
            self.receive()
        self._send_rest()
        started, self._under_way = self._under_way, []
        for work in started:
            work.wait()

    def expect(self) -> None:
        """Start receiving. Called on the other ranks."""
        tensor = torch.empty(self._capacity, dtype=torch.uint8, device=self._device)
        self._expected = (self._scatter(tensor, None), tensor)

    def receive(self) -> Bytes:
        """The next message. Called on the other ranks."""
        if self._expected is None:
            self.expect()
        assert self._expected is not None
        work, tensor = self._expected
        self._expected = None
        work.wait()
        longest = longest_bytes(tensor[:HEADER_BYTES].cpu().numpy())
        if longest > self._capacity:
            whole = torch.empty(longest, dtype=torch.uint8, device=self._device)
            whole[: self._capacity] = tensor
            self._scatter(whole[self._capacity :], None).wait()
            tensor = whole
        self._capacity = _next_capacity(longest, self._capacity)
        return tensor.cpu().numpy()

    def _send_rest(self) -> None:
        if self._rest is None:
            return
        rows, longest = self._rest
        self._rest = None
        if longest > self._capacity:
            self._start(rows[:, self._capacity : longest])
        self._capacity = _next_capacity(longest, self._capacity)

    def _write(self, messages: Sequence[Outgoing], longest: int) -> torch.Tensor:
        """Messages as rows, in memory that nothing on its way uses."""
        length = max(longest, self._capacity)
        rows = self._rows.pop(0)
        if rows.shape != (self._num_ranks, length):
            rows = torch.empty((self._num_ranks, length), dtype=torch.uint8)
        self._rows.append(rows)
        for row, message in zip(rows[1:].numpy(), messages, strict=True):
            message.write(row, longest=longest)
        return rows

    def _start(self, rows: torch.Tensor) -> None:
        """Scatter rows; the first is the sender's own, which it has already."""
        pieces = list(rows.unbind())
        self._under_way.append(self._scatter(pieces[0], pieces))

    def _scatter(self, tensor: torch.Tensor, pieces: list[torch.Tensor] | None) -> Any:
        self._held = [*self._held[-3:], pieces or [tensor]]
        return dist.scatter(tensor, pieces, self._source, group=self._group, async_op=True)


def transport_device(group: dist.ProcessGroup, device: torch.device | None) -> torch.device:
    """The CPU where the group can, since what is read lies there; else the ranks' accelerator."""
    backends = dist.get_backend_config(group)
    if "cpu" in backends or device is None:
        return torch.device("cpu")
    return device


def _next_capacity(used: int, capacity: int) -> int:
    """Somewhat more than the last message took, if that was too much or far too little."""
    if capacity // 4 <= used <= capacity:
        return capacity
    return max(_FIRST_BYTES, -(-(used + used // 4) // 1024) * 1024)
