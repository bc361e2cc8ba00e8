from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher.membership.elastic_state import ElasticState, MemberNode, NodeStatus

nodes = st.builds(MemberNode, number=st.integers(1), host=st.text(), processes=st.integers(1))
states = st.builds(ElasticState, round=st.integers(0), members=st.lists(nodes).map(tuple), closed=st.text())


@given(states)
def test_a_state_is_the_same_behind_its_text(state: ElasticState) -> None:
    assert ElasticState.from_json(state.to_json().encode()) == state


@given(nodes)
def test_a_node_is_the_same_behind_its_text(node: MemberNode) -> None:
    assert MemberNode.from_json(node.to_json().encode()) == node


def test_a_status_is_the_same_behind_its_text() -> None:
    status = NodeStatus(count=3, ready=2, left="failed", exit_code=5, has_seen_end=True)
    assert NodeStatus.from_json(status.to_json().encode()) == status


def test_a_node_has_a_name_by_its_place_in_the_round() -> None:
    first, second, other = (
        MemberNode(number=n, host=h, processes=1) for n, h in ((4, "x"), (2, "y"), (9, "z"))
    )
    state = ElasticState(round=3, members=(first, second))
    assert [state.name_of(node) for node in (first, second, other)] == [
        "node 0 (host x)",
        "node 1 (host y)",
        "a new node (host z)",
    ]
