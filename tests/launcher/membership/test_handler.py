"""Nodes of an elastic run as threads of one process, without ranks."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.membership.decision import Limits
from drivetrain_launcher.membership.handler import ElasticMeeting, ElasticNodes
from drivetrain_launcher.membership.member import RoundOverError, RunOverError
from launcher.run.running import wait_until
from processes import free_port

LIMITS = Limits(min_nodes=1, max_nodes=2, silence_seconds=20, gather_seconds=60, wait_seconds=60)


def nodes_of(count: int, limits: Limits = LIMITS) -> list[ElasticNodes]:
    port = free_port()
    meeting = ElasticMeeting(address="127.0.0.1", port=port, run_id="run", processes=4, limits=limits)
    return [ElasticNodes(meeting) for _ in range(count)]


def meet(pool: ThreadPoolExecutor, *nodes: ElasticNodes) -> list[RendezvousInfo]:
    return [future.result(60) for future in [pool.submit(node.next_rendezvous) for node in nodes]]


def end(pool: ThreadPoolExecutor, *nodes: ElasticNodes) -> None:
    """Let all nodes end well; the leader waits for the others."""
    for node in nodes:
        node.finished()
    for node in nodes:
        node.leave("finished")
    for done in [pool.submit(node.shutdown) for node in nodes]:
        assert done.result(60)


def test_nodes_meet_get_places_and_share_keys_that_end_with_the_round() -> None:
    with ThreadPoolExecutor(8) as pool:
        nodes = nodes_of(2)
        places = meet(pool, *nodes)
        nodes = [node for _, node in sorted(zip(places, nodes, strict=True), key=lambda pair: pair[0].rank)]
        places = sorted(places, key=lambda place: place.rank)
        assert [(place.rank, place.world_size) for place in places] == [(0, 2), (1, 2)]
        assert nodes[0].state.world_size == 8
        first, second = (place.store for place in places)
        first.set("key", "value")
        assert second.get("key") == b"value"
        assert [first.add("sum", 2), second.add("sum", 3)] == [2, 5]
        with pytest.raises(DistStoreError, match="missing: no value within"):
            second.wait(["missing"], timedelta(milliseconds=10))
        waits = pool.submit(first.wait, ["missing"])
        nodes[1].leave("stopped")
        with pytest.raises(RoundOverError, match=r"round 1 is over: node 1 \(host .*\) was stopped"):
            waits.result(60)
        wait_until(nodes[0].num_nodes_waiting)
        assert nodes[0].can_save
        assert nodes[1].shutdown()
        (place,) = meet(pool, nodes[0])
        assert (place.rank, place.world_size) == (0, 1)
        assert not place.store.check(["key"])  # of the round before
        assert nodes[0].num_nodes_waiting() == 0
        end(pool, nodes[0])


@pytest.mark.slow
def test_the_ranks_of_each_round_get_a_store_of_their_own_at_another_port() -> None:
    with ThreadPoolExecutor(4) as pool:
        alone = Limits(min_nodes=1, max_nodes=2, silence_seconds=20, gather_seconds=0.1, wait_seconds=60)
        node, newcomer = nodes_of(2, alone)
        (first,) = meet(pool, node)
        old = first.bootstrap_store_info
        ranks_store = TCPStore(old.master_addr, old.master_port, is_master=False, wait_for_workers=False)
        ranks_store.set("of a rank", "1")
        comes = pool.submit(newcomer.next_rendezvous)
        wait_until(node.num_nodes_waiting)
        (second,) = meet(pool, node)
        assert comes.result(60).bootstrap_store_info.master_port == second.bootstrap_store_info.master_port
        assert second.bootstrap_store_info.master_port != old.master_port
        assert second.world_size == 2
        end(pool, node, newcomer)


def test_a_node_that_waits_learns_that_the_run_is_over_and_how() -> None:
    with ThreadPoolExecutor(8) as pool:
        alone = Limits(min_nodes=1, max_nodes=1, silence_seconds=20, gather_seconds=0.1, wait_seconds=60)
        node, spare = nodes_of(2, alone)
        meet(pool, node)
        waits = pool.submit(spare.next_rendezvous)
        node.leave("failed", exit_code=7)
        with pytest.raises(RunOverError, match="ended with exit code 7") as caught:
            waits.result(60)
        assert caught.value.exit_code == 7
        assert spare.is_closed()
        for done in [pool.submit(each.shutdown) for each in (spare, node)]:
            assert done.result(60)


def test_a_store_of_another_run_is_told_from_ones_own() -> None:
    with ThreadPoolExecutor(4) as pool:
        alone = Limits(min_nodes=1, max_nodes=1, silence_seconds=20, gather_seconds=0.1, wait_seconds=60)
        port = free_port()
        one, two = (
            ElasticNodes(
                ElasticMeeting(address="127.0.0.1", port=port, run_id=name, processes=1, limits=alone)
            )
            for name in ("one", "two")
        )
        meet(pool, one)
        with pytest.raises(
            LaunchError, match=rf"--rdzv-id two: the store at 127\.0\.0\.1:{port} belongs to run 'one'"
        ):
            two.next_rendezvous()
        assert two.shutdown()
        end(pool, one)
