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


def sent(batch: Any) -> Outgoing:
    return Outgoing([take_apart("note", batch)], [0], loop=1, with_layout=True)


def message(value: int, size: int = 10) -> Outgoing:
    return sent(torch.full((size,), value))


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


def lent_tensor(sender: SharedMemoryChannel, size: int = 10) -> torch.Tensor | None:
    lent = sender.lend(1)
    return None if lent is None else lent.tensor(torch.int64, torch.Size((size,)))


@pytest.fixture
def warm(ends: Any) -> Any:
    """A sender and a receiver of which every slot has held a message."""
    sender, receiver = SharedMemoryChannel({1: ends[0]}), SharedMemoryChannel({0: ends[1]})
    for number in range(4):
        sender.send([message(number)], complete=True)
        assert value_of(receiver) == number
    return sender, receiver


def test_a_batch_in_lent_memory_is_sent_from_where_it_lies(warm: Any) -> None:
    sender, receiver = warm
    for number in range(10, 16):
        tensor = lent_tensor(sender)
        assert tensor is not None
        tensor.fill_(number)
        sender.send([sent(tensor)], complete=True)
        address = tensor.data_ptr()
        tensor.fill_(number + 100)  # seen by the receiver if nothing was copied
        assert value_of(receiver) == number + 100
        assert tensor.data_ptr() == address


def test_what_lies_in_lent_memory_is_kept_until_it_is_sent_or_dropped(warm: Any) -> None:
    sender, receiver = warm
    one, two = lent_tensor(sender), lent_tensor(sender)
    assert one is not None
    assert two is not None
    one.fill_(1)
    two.fill_(2)
    assert lent_tensor(sender) is None  # the rest is left to messages that lie nowhere
    for number in range(3, 9):
        sender.send([message(number)], complete=True)
        assert value_of(receiver) == number
    sender.send([sent(two)], complete=True)
    sender.send([sent(one)], complete=True)
    assert (value_of(receiver), value_of(receiver)) == (2, 1)


def test_lent_memory_that_is_dropped_is_lent_again(warm: Any) -> None:
    sender, _ = warm
    assert all(lent_tensor(sender) is not None for _ in range(9))


def test_memory_is_lent_only_while_a_slot_is_free_and_without_waiting(warm: Any) -> None:
    sender, receiver = warm
    kept = [lent_tensor(sender), lent_tensor(sender)]
    sender.send([message(1)], complete=True)
    sender.send([message(2)], complete=True)
    kept.clear()
    kept += [lent_tensor(sender), lent_tensor(sender), lent_tensor(sender)]
    assert [tensor is None for tensor in kept] == [False, False, True]
    assert (value_of(receiver), value_of(receiver)) == (1, 2)


def test_a_tensor_that_lies_where_another_is_written_arrives_whole(warm: Any) -> None:
    sender, receiver = warm
    tensor = lent_tensor(sender)
    assert tensor is not None
    tensor.copy_(torch.arange(10))
    sender.send([sent([torch.full((6,), 5), tensor])], complete=True)
    incoming = Incoming(receiver.receive())
    assert incoming.layout is not None
    first, second = incoming.batch(incoming.layout, 0)
    assert (first.tolist(), second.tolist()) == ([5] * 6, list(range(10)))


def test_memory_is_lent_for_the_dtypes_and_shapes_of_the_last_message_alone(warm: Any) -> None:
    sender, _ = warm
    for dtype, size in ((torch.int32, 10), (torch.int64, 11)):
        lent = sender.lend(1)
        assert lent is not None
        assert lent.tensor(dtype, torch.Size((size,))) is None


def test_a_receiver_that_has_ended_is_told_by_the_next_message_and_not_while_reading(
    ends: Any, warm: Any
) -> None:
    sender, _ = warm
    sender.send([message(1)], complete=True)
    ends[1].close()
    lent_tensor(sender)
    with pytest.raises(DispatchError, match="that is handed batches has ended, rank 1 of the group"):
        sender.send([message(2)], complete=True)


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
