import socket

import pytest

from drivetrain_launcher import Host, LaunchError, LaunchSettings, LaunchTarget, plan_launch
from drivetrain_launcher.membership.rendezvous import OneNode, rendezvous_of
from processes import free_port


def test_two_runs_never_get_the_same_port() -> None:
    meetings = [OneNode("127.0.0.1", 0, "none").next_rendezvous() for _ in range(4)]
    ports = [meeting.bootstrap_store_info.master_port for meeting in meetings]
    assert len(set(ports)) == 4


def test_each_start_of_the_ranks_gets_an_empty_store() -> None:
    node = OneNode("127.0.0.1", 0, "none")
    first = node.next_rendezvous()
    first.store.set("left", "behind")
    second = node.next_rendezvous()
    assert not second.store.check(["left"])
    assert (second.rank, second.world_size) == (0, 1)


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        (LaunchSettings(num_processes=2), "static"),
        (LaunchSettings(num_nodes=2, node_rank=1, master_addr="::1", processes_per_node=1), "static"),
    ],
)
def test_the_handler_fits_the_plan(settings: LaunchSettings, backend: str) -> None:
    handler = rendezvous_of(plan_launch(settings, LaunchTarget(name="x.py"), Host()))
    assert handler.get_backend() == backend
    assert handler.use_agent_store
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()


@pytest.mark.slow
def test_nodes_that_agree_on_their_ranks_count_those_that_came() -> None:
    settings = LaunchSettings(
        num_nodes=3, master_addr="127.0.0.1", master_port=free_port(), rdzv_backend="c10d", rdzv_id="run",
        rdzv_timeout_seconds=3, processes_per_node=1,
    )  # fmt: skip
    plan = plan_launch(settings, LaunchTarget(name="x.py"), Host())
    node = rendezvous_of(plan)
    with pytest.raises(
        LaunchError, match=r"1 of 3 nodes came to 127.0.0.1:\d+ within 3 s: .*Missing: 2 without a name"
    ):
        node.next_rendezvous()
    node.shutdown()


def test_the_store_of_one_node_listens_on_loopback_alone() -> None:
    place = OneNode("127.0.0.1", 0, "none").next_rendezvous().bootstrap_store_info
    assert place is not None
    with pytest.raises(ConnectionRefusedError, match="refused"):
        socket.create_connection(("127.0.0.2", place.master_port), timeout=5)
