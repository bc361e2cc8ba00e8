from hypothesis import given
from hypothesis import strategies as st

from drivetrain_dispatch.order import Cursor, Order

parts = st.lists(st.integers(0, 9), max_size=30)


def test_what_comes_next_is_what_came_next_the_last_time() -> None:
    order = Order([0, 1, 2, 3], 2)
    cursor = Cursor()
    cursor.begin(order)
    seen = [cursor.ahead]
    for part in (0, 2, 1, 2, 3):
        cursor.use(part)
        seen.append(cursor.ahead)
    assert seen == [(0, 1), (1, 2), (3,), (2, 3), (3,), ()]
    cursor.end(whole=True)
    assert cursor.ahead == ()
    assert order.parts == (0, 2, 1, 2, 3)
    cursor.begin(order)
    assert cursor.ahead == (0, 2)


def test_a_forward_that_failed_teaches_nothing() -> None:
    order = Order([0, 1, 2], 1)
    cursor = Cursor()
    cursor.begin(order)
    cursor.use(2)
    cursor.end(whole=False)
    assert order.parts == (0, 1, 2)


def test_a_forward_within_a_forward_is_part_of_it() -> None:
    order = Order([0, 1], 1)
    cursor = Cursor()
    for _ in range(2):
        cursor.begin(order)
    cursor.use(1)
    cursor.end(whole=True)
    assert cursor.depth == 1
    cursor.use(0)
    cursor.end(whole=True)
    assert cursor.depth == 0
    assert order.parts == (1, 0)


@given(learnt=parts, used=parts, count=st.integers(0, 4))
def test_no_order_of_calls_leads_astray(learnt: list[int], used: list[int], count: int) -> None:
    order = Order(learnt, count)
    cursor = Cursor()
    cursor.begin(order)
    for part in used:
        cursor.use(part)
        assert len(cursor.ahead) <= count
        assert len(set(cursor.ahead)) == len(cursor.ahead)
        assert set(cursor.ahead) <= set(learnt)
    cursor.end(whole=True)
    # The same forward again is foreseen from its first part to its last.
    cursor.begin(order)
    for position, part in enumerate(used):
        if count:
            assert part in cursor.ahead
        cursor.use(part)
        assert cursor.ahead == tuple(dict.fromkeys(used[position + 1 : position + 1 + count]))


@given(learnt=parts, count=st.integers(0, 5))
def test_a_backward_goes_the_other_way(learnt: list[int], count: int) -> None:
    order = Order(learnt)
    for part in set(learnt):
        position = order.last_position(part)
        assert learnt[position] == part
        assert part not in learnt[position + 1 :]
        before = learnt[max(0, position - count) : position][::-1]
        assert order.before(position, count) == list(dict.fromkeys(before))
