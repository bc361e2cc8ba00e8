import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_state import Topology, topology_from_hosts


def test_one_process_is_main_and_last() -> None:
    alone = Topology()
    assert alone.is_main
    assert alone.is_local_main
    assert alone.is_last


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2 with world_size=2"),
        ({"rank": -1}, "rank=-1 with world_size=1"),
        ({"local_rank": 1, "rank": 1, "world_size": 2}, "local_rank=1 with local_world_size=1"),
        ({"node_rank": 1}, "node_rank=1 with num_nodes=1"),
        ({"local_world_size": 2}, "local_world_size=2 with world_size=1"),
    ],
)
def test_impossible_places_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**values)


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=12))
def test_hosts_give_every_rank_its_own_place(hosts: list[str]) -> None:
    places = [topology_from_hosts(hosts, rank) for rank in range(len(hosts))]
    assert [place.rank for place in places] == list(range(len(hosts)))
    assert len({(place.node_rank, place.local_rank) for place in places}) == len(hosts)
    for place in places:
        assert place.local_world_size == hosts.count(hosts[place.rank])
        assert place.num_nodes == len(set(hosts))
    assert sum(place.is_local_main for place in places) == len(set(hosts))
    assert sum(place.is_last for place in places) == 1
