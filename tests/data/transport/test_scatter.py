from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain_data.transport.message import Incoming, Outgoing, take_apart
from drivetrain_data.transport.scatter import ScatterChannel, transport_device
from drivetrain_data.transport.shared_memory import meet

SIZES = [10, 10, 100_000, 99_000, 100, 3_000, 1, 2_000_000, 5]


def message(rank: int, number: int, size: int) -> Outgoing:
    step = take_apart("note", torch.full((size,), rank + number))
    return Outgoing([step], [number], loop=1, with_layout=True)


def sent_and_received(kind: str, complete: bool, expects: bool) -> list[Any]:
    group = dist.group.WORLD
    assert group is not None
    channel = ScatterChannel(group, torch.device("cpu")) if kind == "scatter" else meet(group)
    assert channel is not None
    found: list[Any] = []
    kept: list[torch.Tensor] = []
    for number, size in enumerate(SIZES):
        if dist.get_rank() == 0:
            # every rank has a message of its own length
            messages = [message(to, number, size + to) for to in range(1, dist.get_world_size())]
            channel.send(messages, complete=complete)
            continue
        if expects:
            channel.expect()
        incoming = Incoming(channel.receive())
        assert incoming.layout is not None
        kept.append(incoming.batch(incoming.layout, 0))
        found.append((incoming.loop, incoming.tags, len(kept[-1])))
    channel.settle()
    # A later message does not write over an earlier one that is still held.
    return [(*seen, tensor.unique().tolist()) for seen, tensor in zip(found, kept, strict=True)]


@pytest.mark.parametrize("kind", ["scatter", "shared memory"])
@pytest.mark.parametrize(("complete", "expects"), [(True, False), (False, True)])
@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.default_cases("4-True-False-scatter", "4-False-True-shared memory")
def test_messages_that_grow_and_shrink_arrive_whole_and_in_order(
    run_ranks, num_processes: int, complete: bool, expects: bool, kind: str
) -> None:
    reader, *others = run_ranks(sent_and_received, kind, complete, expects, num_processes=num_processes)
    assert reader == []
    for rank, found in enumerate(others, start=1):
        assert found == [(1, [n], size + rank, [rank + n]) for n, size in enumerate(SIZES)]


def place_of_transport() -> str:
    return str(transport_device(dist.group.WORLD, torch.device("cuda")))


def test_messages_go_by_the_cpu_where_the_group_can(run_ranks) -> None:
    assert run_ranks(place_of_transport) == ["cpu", "cpu"]
