from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher.membership.decision import Limits, Peer, decide, is_alive
from drivetrain_launcher.membership.elastic_state import ElasticState, Leave, MemberNode, NodeStatus

LIMITS = Limits(min_nodes=2, max_nodes=3, silence_seconds=6, gather_seconds=5, wait_seconds=60)
HOSTS = "abcdef"


def peer(
    number: int, *, ready: int = 1, silent: float = 0, left: Leave = "", finished: int = 0, exit_code: int = 0
) -> Peer:
    node = MemberNode(number=number, host=HOSTS[number - 1], processes=8)
    status = NodeStatus(ready=ready, finished=finished, left=left, exit_code=exit_code)
    return Peer(node=node, status=status, silent_seconds=silent)


def then(
    state: ElasticState, *peers: Peer, limits: Limits = LIMITS, gathering: float = 0, quiet: float = 0
) -> ElasticState:
    return decide(state, peers, limits, gathering_seconds=gathering, quiet_seconds=quiet)


def running(*numbers: int, number: int = 1) -> ElasticState:
    members = tuple(peer(each).node for each in numbers)
    return ElasticState(round=number, members=members, ranks_port=1)


def test_the_first_round_begins_with_the_most_nodes_at_once_and_with_fewer_when_no_other_comes() -> None:
    two = (peer(1), peer(2))
    assert then(ElasticState(), *two, quiet=4.9).round == 0
    assert then(ElasticState(), *two, quiet=5).members == (two[0].node, two[1].node)
    assert then(ElasticState(), *two, peer(3)).world_size == 24
    assert then(ElasticState(), peer(1), quiet=50).round == 0


def test_the_leader_has_the_first_rank_even_if_it_came_last() -> None:
    late = ElasticState(round=2, members=(peer(3).node, peer(1).node), is_over=True)
    state = then(late, peer(1, ready=3), peer(3, ready=3))
    assert [node.number for node in state.members] == [1, 3]


def test_a_silent_node_ends_the_round_which_goes_on_without_it_once_the_others_are_ready() -> None:
    over = then(running(1, 2, 3), peer(1), peer(2, silent=6.4), peer(3))
    assert (over.is_over, over.change, over.reason) == (
        True,
        "lost",
        "node 1 (host b) has been silent for 6 s",
    )
    assert then(over, peer(1, ready=2), peer(2, silent=7), peer(3)) == over
    state = then(over, peer(1, ready=2), peer(2, silent=7), peer(3, ready=2))
    assert (state.round, [node.number for node in state.members], state.is_over) == (2, [1, 3], False)
    assert state.reason == over.reason


def test_a_silence_within_the_limit_changes_nothing() -> None:
    state = running(1, 2)
    assert then(state, peer(1), peer(2, silent=6)) == state


def test_a_node_that_was_left_behind_comes_back_when_its_ranks_are_stopped_not_before() -> None:
    state = running(1, 3, number=2)
    assert then(state, peer(1, ready=2), peer(2, ready=1), peer(3, ready=2)) == state
    over = then(state, peer(1, ready=2), peer(2, ready=3), peer(3, ready=2))
    assert (over.change, over.reason) == ("joined", "a new node (host b) came")


def test_a_node_beyond_the_most_waits_for_the_place_of_another() -> None:
    state = running(1, 2, 3)
    spare = peer(4, ready=2)
    assert then(state, peer(1), peer(2), peer(3), spare) == state
    over = then(state, peer(1), peer(2, silent=9), peer(3), spare)
    state = then(over, peer(1, ready=2), peer(2, silent=9), peer(3, ready=2), spare)
    assert [node.number for node in state.members] == [1, 3, 4]


def test_ranks_that_restart_on_one_node_restart_on_all() -> None:
    over = then(running(1, 2), peer(1), peer(2, ready=2))
    assert (over.change, over.reason) == ("failed", "node 1 (host b) restarts its ranks")


def test_ranks_that_failed_for_good_end_the_run_with_their_exit_code() -> None:
    state = then(running(1, 2), peer(1), peer(2, left="failed", exit_code=5))
    assert (state.closed, state.exit_code) == ("the ranks of node 1 (host b) ended with exit code 5", 5)


def test_a_failure_on_a_node_that_takes_no_part_does_not_end_the_run_unless_it_leads() -> None:
    assert not then(running(1, 3), peer(1), peer(2, left="failed", exit_code=1), peer(3)).closed
    assert then(ElasticState(), peer(1, left="failed", exit_code=1)).closed


@pytest.mark.parametrize(("number", "ends"), [(1, True), (2, False)])
def test_a_stopped_node_ends_the_run_only_if_it_hosts_the_store(number: int, ends: bool) -> None:
    peers = [peer(each, left="stopped" if each == number else "") for each in (1, 2, 3)]
    state = then(running(1, 2, 3), *peers)
    assert bool(state.closed) == ends
    assert state.change == "left"


def test_too_few_nodes_end_the_run_when_the_wait_is_over_with_what_happened_before() -> None:
    over = then(running(1, 2), peer(1), peer(2, silent=7))
    peers = (peer(1, ready=2), peer(2, silent=70))
    assert then(over, *peers, gathering=60) == over
    state = then(over, *peers, gathering=61)
    assert state.closed == (
        "1 of at least 2 nodes came within 60 s (node 1 (host b) has been silent for 7 s)"
    )
    assert state.exit_code == 1


def test_a_run_whose_ranks_have_all_ended_well_is_over_without_an_error() -> None:
    state = running(1, 2)
    assert then(state, peer(1, finished=1), peer(2)) == state
    over = then(state, peer(1, finished=1), peer(2, finished=1, left="finished"))
    assert over.closed
    assert over.exit_code == 0


def test_nobody_is_taken_in_when_ranks_have_begun_to_end_and_a_loss_then_ends_the_run() -> None:
    state = running(1, 2)
    assert then(state, peer(1, finished=1), peer(2), peer(3, ready=2)) == state
    over = then(state, peer(1, finished=1), peer(2, silent=7))
    assert "while the ranks of other nodes had ended" in over.closed
    assert over.exit_code == 1


events = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["beat", "ready", "silent", "leave", "finish"])), max_size=60
)


@given(events, st.integers(1, 3), st.integers(0, 3))
def test_whatever_happens_a_round_has_the_leader_first_and_only_nodes_that_live_and_are_ready(
    played: list[tuple[int, str]], least: int, more: int
) -> None:
    limits = replace(LIMITS, min_nodes=least, max_nodes=least + more)
    state, peers = ElasticState(), [peer(1)]
    for index, what in played:
        if index >= len(peers):
            peers.append(peer(len(peers) + 1, ready=state.round + 1))
        index = min(index, len(peers) - 1)
        peers[index] = changed(peers[index], what, state)
        before = state
        state = decide(state, peers, limits, gathering_seconds=1, quiet_seconds=9)
        if before.closed:
            assert state == before
        if state.round == before.round:
            continue
        assert state.round == before.round + 1
        assert not before.is_running
        assert least <= len(state.members) <= limits.max_nodes
        assert len({node.number for node in state.members}) == len(state.members)
        by_number = {each.node.number: each for each in peers}
        for node in state.members:
            assert is_alive(by_number[node.number], limits)
            assert by_number[node.number].status.ready == state.round
        if is_alive(peers[0], limits):
            assert state.members[0].number == 1


def changed(one: Peer, what: str, state: ElasticState) -> Peer:
    status = one.status
    if what == "ready":
        return replace(one, silent_seconds=0, status=replace(status, ready=state.round + 1, finished=0))
    if what == "silent":
        return replace(one, silent_seconds=7)
    if what == "leave":
        return replace(one, status=replace(status, left="stopped"))
    if what == "finish" and state.rank_of(one.node.number) is not None:
        return replace(one, status=replace(status, finished=state.round))
    return replace(one, silent_seconds=0)
