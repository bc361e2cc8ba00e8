"""A channel that sends messages by a scatter of the group, also to ranks on other machines."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from drivetrain_data.transport.message import HEADER_BYTES, Bytes, Outgoing, longest_bytes

_FIRST_BYTES = 4096


class ScatterChannel:
    """A channel that sends a message by one scatter; all ranks derive its size from the last message.

    If a message exceeds the size, a second scatter sends the rest.
    """

    name = "a scatter"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._num_ranks = dist.get_world_size(group)
        self._source = dist.get_global_rank(group, 0)
        self._capacity = _FIRST_BYTES  # the bytes of the first scatter of the next message
        # Two buffers, written in turn: one is being sent while the other is filled.
        self._rows = [torch.empty((0, 0), dtype=torch.uint8)] * 2
        self._under_way: list[Any] = []
        # gloo's thread releases a tensor after wait() has returned. Releasing the last reference needs the
        # interpreter and aborts the process during its shutdown, so references to the latest tensors are kept here.
        self._held: list[list[torch.Tensor]] = []
        self._rest: tuple[torch.Tensor, int] | None = None
        self._expected: tuple[Any, torch.Tensor] | None = None

    def send(self, messages: Sequence[Outgoing], *, complete: bool) -> None:
        """Start sending messages; a needed second scatter starts only with `complete`. Called on the first rank."""
        self._send_rest()
        before, self._under_way = self._under_way, []
        longest = max(message.used for message in messages)
        length = max(longest, self._capacity)
        written = self._rows.pop(0)
        if written.shape != (self._num_ranks, length):
            written = torch.empty((self._num_ranks, length), dtype=torch.uint8)
        self._rows.append(written)
        for row, message in zip(written[1:].numpy(), messages, strict=True):
            message.write(row, longest=longest)
        rows = written.to(self._device)
        self._start(rows[:, : self._capacity])
        self._rest = (rows, longest)
        if complete:
            self._send_rest()
        # Wait for the previous message only now, while this one is being sent: the next call reuses its buffer.
        for work in before:
            work.wait()

    def settle(self) -> None:
        """Finish sending the last message, or receiving an announced one. Called on all ranks."""
        if self._expected is not None:
            self.receive()
        self._send_rest()
        started, self._under_way = self._under_way, []
        for work in started:
            work.wait()

    def expect(self) -> None:
        """Start receiving the next message. Called on the other ranks."""
        tensor = torch.empty(self._capacity, dtype=torch.uint8, device=self._device)
        self._expected = (self._scatter(tensor, None), tensor)

    def receive(self) -> Bytes:
        """Return the next message. Called on the other ranks."""
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

    def _start(self, rows: torch.Tensor) -> None:
        """Start a scatter of rows; the first row goes to the sender itself, which does not read it."""
        pieces = list(rows.unbind())
        self._under_way.append(self._scatter(pieces[0], pieces))

    def _scatter(self, tensor: torch.Tensor, pieces: list[torch.Tensor] | None) -> Any:
        self._held = [*self._held[-3:], pieces or [tensor]]
        return dist.scatter(tensor, pieces, self._source, group=self._group, async_op=True)


def transport_device(group: dist.ProcessGroup, device: torch.device | None) -> torch.device:
    """Return the CPU, where batches are read, if the group supports it; else the ranks' accelerator."""
    backends = dist.get_backend_config(group)
    if "cpu" in backends or device is None:
        return torch.device("cpu")
    return device


def _next_capacity(used: int, capacity: int) -> int:
    """Return the size of the next first scatter: unchanged unless the last message was too large or far smaller."""
    if capacity // 4 <= used <= capacity:
        return capacity
    return max(_FIRST_BYTES, -(-(used + used // 4) // 1024) * 1024)
