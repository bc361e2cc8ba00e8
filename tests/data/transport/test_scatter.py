import torch
import torch.distributed as dist

from drivetrain_data.transport.scatter import transport_device


def place_of_transport() -> str:
    return str(transport_device(dist.group.WORLD, torch.device("cuda")))


def test_messages_go_by_the_cpu_where_the_group_can(run_ranks) -> None:
    assert run_ranks(place_of_transport) == ["cpu", "cpu"]
