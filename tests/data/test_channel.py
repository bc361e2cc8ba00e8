from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain_data.channel import Channel, transport_device
from drivetrain_data.packing import Incoming, Outgoing, take_apart

SIZES = [10, 10, 100_000, 99_000, 100, 3_000, 1, 2_000_000, 5]


def message(rank: int, number: int, size: int) -> Outgoing:
    return Outgoing([take_apart("note", torch.full((size,), rank + number))], [number], with_layout=True)


def sent_and_received(complete: bool) -> list[Any]:
    rank, count = dist.get_rank(), dist.get_world_size()
    channel = Channel(dist.group.WORLD, torch.device("cpu"))
    found: list[Any] = []
    for number, size in enumerate(SIZES):
        if rank == 0:
            # every rank has a message of its own length
            channel.send([message(to, number, size + to) for to in range(count)], complete=complete)
            continue
        incoming = Incoming(channel.receive())
        assert incoming.layout is not None
        tensor = incoming.batch(incoming.layout, 0)
        found.append((incoming.tags, len(tensor), tensor.unique().tolist()))
    channel.settle()
    return found


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("num_processes", [2, 4])
def test_messages_that_grow_and_shrink_arrive_whole_and_in_order(
    run_ranks, num_processes: int, complete: bool
) -> None:
    reader, *others = run_ranks(sent_and_received, complete, num_processes=num_processes)
    assert reader == []
    for rank, found in enumerate(others, start=1):
        assert found == [([n], size + rank, [rank + n]) for n, size in enumerate(SIZES)]


def place_of_transport() -> str:
    return str(transport_device(dist.group.WORLD, torch.device("cuda")))


def test_messages_go_by_the_cpu_where_the_group_can(run_ranks) -> None:
    assert run_ranks(place_of_transport) == ["cpu", "cpu"]
