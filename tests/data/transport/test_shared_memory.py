import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain_data import DispatchError
from drivetrain_data.transport.message import Incoming, Outgoing, take_apart
from drivetrain_data.transport.shared_memory import SharedMemoryChannel, meet


def message(value: int, size: int = 10) -> Outgoing:
    return Outgoing([take_apart("note", torch.full((size,), value))], [0], loop=1, with_layout=True)


def value_of(channel: SharedMemoryChannel) -> int:
    incoming = Incoming(channel.receive())
    assert incoming.layout is not None
    return int(incoming.batch(incoming.layout, 0)[-1])


@pytest.fixture
def ends() -> Any:
    """A sender and its only receiver, in one process."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
        listener.bind("")  # a name of the kernel's choice
        listener.listen(1)
        receiving = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        receiving.connect(listener.getsockname())
        sending, _ = listener.accept()
    with sending, receiving:
        yield sending, receiving


def test_two_messages_may_wait_and_come_in_order(ends: Any) -> None:
    sender, receiver = SharedMemoryChannel({1: ends[0]}), SharedMemoryChannel({0: ends[1]})
    sender.send([message(1)], complete=True)
    sender.send([message(2, size=300_000)], complete=True)
    assert (value_of(receiver), value_of(receiver)) == (1, 2)
    sender.send([message(3)], complete=True)
    assert value_of(receiver) == 3


def test_a_sender_that_has_ended_is_noticed_after_its_last_message(ends: Any) -> None:
    sender, receiver = SharedMemoryChannel({1: ends[0]}), SharedMemoryChannel({0: ends[1]})
    for number in range(3):
        sender.send([message(number)], complete=True)
        if number == 0:
            assert value_of(receiver) == 0  # whose answer the sender will not have read
    ends[0].close()
    assert (value_of(receiver), value_of(receiver)) == (1, 2)
    with pytest.raises(DispatchError, match="that reads for all has ended, rank 0 of the group"):
        receiver.receive()


@pytest.mark.parametrize("num_sent", [0, 1, 2])
def test_a_receiver_that_has_ended_is_noticed(ends: Any, num_sent: int) -> None:
    sender = SharedMemoryChannel({1: ends[0]})
    for number in range(num_sent):
        sender.send([message(number)], complete=True)
    ends[1].close()
    with pytest.raises(DispatchError, match="that is handed batches has ended, rank 1 of the group"):
        sender.send([message(9)], complete=True)


def test_an_expected_message_is_taken_before_the_channel_settles(ends: Any) -> None:
    sender, receiver = SharedMemoryChannel({1: ends[0]}), SharedMemoryChannel({0: ends[1]})
    receiver.expect()
    sender.send([message(1)], complete=True)
    receiver.settle()
    receiver.settle()
    sender.send([message(2)], complete=True)
    assert value_of(receiver) == 2


def meet_with(obstacle: str, folder: str) -> tuple[bool, list[str]]:
    import tempfile

    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        if obstacle == "no such memory" and rank == 0:
            patch.delattr(os, "memfd_create")
        if obstacle == "a long path" and rank == 0:
            patch.setattr(tempfile, "tempdir", f"{folder}/{'x' * 120}")
            Path(tempfile.gettempdir()).mkdir()
        if obstacle == "one rank elsewhere" and rank == 2:
            patch.setattr(socket.socket, "connect", _refuse)
        group = dist.group.WORLD
        assert group is not None
        met = meet(group) is not None
    dist.barrier()
    return met, [path.name for path in Path(folder).rglob("drivetrain-*")]


def _refuse(self: socket.socket, address: object) -> None:
    raise FileNotFoundError(2, "No such file or directory")


@pytest.mark.parametrize("obstacle", ["none", "no such memory", "a long path", "one rank elsewhere"])
def test_ranks_meet_or_all_know_that_they_cannot_and_nothing_is_left(
    run_ranks, obstacle: str, tmp_path: Path
) -> None:
    found = run_ranks(meet_with, obstacle, str(tmp_path), num_processes=4)
    assert found == [(obstacle == "none", [])] * 4
