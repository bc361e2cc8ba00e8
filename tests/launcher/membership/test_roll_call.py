"""Nodes that meet over real stores, each in a thread."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from drivetrain_launcher import LaunchError
from drivetrain_launcher.membership.roll_call import Meeting, StaticNodes
from processes import free_port


def meeting(**changes: object) -> Meeting:
    made = Meeting(address="127.0.0.1", port=free_port(), run_id="run", num_nodes=3, timeout_seconds=30)
    return replace(made, **changes)


def outcomes(nodes: list[StaticNodes]) -> list[str]:
    """What each node says after it met, or failed to."""

    def meet(node: StaticNodes) -> str:
        try:
            found = node.next_rendezvous()
        except LaunchError as error:
            return str(error)
        return f"node {found.rank} of {found.world_size}"

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(meet, nodes))


def test_all_nodes_meet_once_and_for_restarts() -> None:
    place = meeting()
    nodes = [StaticNodes(place, rank=rank) for rank in range(3)]
    for _ in range(2):
        assert outcomes(nodes) == [f"node {rank} of 3" for rank in range(3)]
    assert nodes[0].use_agent_store


@pytest.mark.slow
def test_every_node_that_came_names_those_that_are_missing() -> None:
    place = meeting(timeout_seconds=3, hosts=("a1", "a2", "a3"))
    said = outcomes([StaticNodes(place, rank=rank) for rank in (0, 2)])
    for text in said:
        assert text.startswith(f"2 of 3 nodes came to 127.0.0.1:{place.port} within 3 s: node 0 (a1) on ")
        assert re.search(
            r"node 2 \(a3\) on .*process \d+\. Missing: node 1 \(a2\); look at the output there", text
        )


def test_a_node_whose_node_0_never_comes_says_so() -> None:
    place = meeting(timeout_seconds=1)
    (said,) = outcomes([StaticNodes(place, rank=1)])
    assert said.startswith(
        f"the 3 nodes did not meet at 127.0.0.1:{place.port} within 1 s: node 1, this one, could not"
    )


@pytest.mark.slow
def test_two_nodes_with_the_same_rank_are_told() -> None:
    place = meeting(timeout_seconds=3)
    said = sorted(
        outcomes([StaticNodes(place, rank=0), *(StaticNodes(replace(place), rank=1) for _ in range(2))])
    )
    assert [text.partition(" ")[0] for text in said] == ["--node-rank", "2", "2"]
    assert "--node-rank 1: another node came with this rank" in said[0]
    assert "2 of 3 nodes came" in said[1]


@pytest.mark.slow
def test_nodes_that_were_told_different_numbers_are_told() -> None:
    place = meeting(num_nodes=2, timeout_seconds=5)
    said = outcomes([StaticNodes(place, rank=0), StaticNodes(replace(place, num_nodes=3), rank=1)])
    assert any("but another node of run 'run' expects" in text for text in said)
