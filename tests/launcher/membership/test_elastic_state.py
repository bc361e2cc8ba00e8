from hypothesis import given
from hypothesis import strategies as st

from drivetrain_launcher.membership.elastic_state import ElasticState, MemberNode, NodeStatus

nodes = st.builds(MemberNode, number=st.integers(1), host=st.text(), processes=st.integers(1))
states = st.builds(ElasticState, round=st.integers(0), members=st.lists(nodes).map(tuple), closed=st.text())

statuses = st.builds(
    NodeStatus, count=st.integers(0), ready=st.integers(0), left=st.sampled_from(["", "failed"])
)


@given(states | nodes | statuses)
def test_a_message_is_the_same_behind_its_text(message: ElasticState | MemberNode | NodeStatus) -> None:
    assert type(message).from_json(message.to_json().encode()) == message


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
