from hypothesis import given
from hypothesis import strategies as st

from drivetrain_dispatch.offload.execution_order import Cursor, ExecutionOrder

parts = st.lists(st.integers(0, 9), max_size=30)


def test_what_comes_next_is_what_came_next_the_last_time() -> None:
    order = ExecutionOrder([0, 1, 2, 3])
    cursor = Cursor()
    cursor.begin(order)
    seen = [cursor.position]
    for part in (0, 2, 1, 2, 3):
        cursor.use(part)
        seen.append(cursor.position)
    assert seen == [0, 1, 3, 2, 3, 4]
    cursor.end(whole=True)
    assert order.parts == (0, 2, 1, 2, 3)
    cursor.begin(order)
    assert cursor.position == 0


def test_a_forward_that_failed_teaches_nothing() -> None:
    order = ExecutionOrder([0, 1, 2])
    cursor = Cursor()
    cursor.begin(order)
    cursor.use(2)
    cursor.end(whole=False)
    assert order.parts == (0, 1, 2)


def test_a_forward_within_a_forward_is_part_of_it() -> None:
    order = ExecutionOrder([0, 1])
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


@given(learnt=parts, used=parts)
def test_no_order_of_calls_leads_astray(learnt: list[int], used: list[int]) -> None:
    order = ExecutionOrder(learnt)
    cursor = Cursor()
    cursor.begin(order)
    for part in used:
        cursor.use(part)
        assert 0 <= cursor.position <= len(learnt)
        assert part not in learnt or learnt[cursor.position - 1] == part
    cursor.end(whole=True)
    # The same forward again is foreseen from its first part to its last.
    cursor.begin(order)
    for position, part in enumerate(used):
        assert order.parts[cursor.position] == part
        cursor.use(part)
        assert cursor.position == position + 1


@given(learnt=parts)
def test_the_last_use_of_a_part_is_known(learnt: list[int]) -> None:
    order = ExecutionOrder(learnt)
    for part in set(learnt):
        position = order.last_position(part)
        assert learnt[position] == part
        assert part not in learnt[position + 1 :]
