from hypothesis import given
from hypothesis import strategies as st

from drivetrain_dispatch.offload.execution_order import BackwardOrder, ExecutionOrder, OrderRecorder

parts = st.lists(st.integers(0, 9), max_size=30)


def test_what_comes_next_is_what_came_next_the_last_time() -> None:
    order = ExecutionOrder([0, 1, 2, 3])
    recorder = OrderRecorder()
    recorder.begin(order)
    seen = [recorder.position]
    for part in (0, 2, 1, 2, 3):
        recorder.use(part)
        seen.append(recorder.position)
    assert seen == [0, 1, 3, 2, 3, 4]
    recorder.end(completed=True)
    assert order.units == (0, 2, 1, 2, 3)
    recorder.begin(order)
    assert recorder.position == 0


def test_a_forward_within_a_forward_is_part_of_it_and_one_that_failed_teaches_nothing() -> None:
    order, recorder = ExecutionOrder([0, 1]), OrderRecorder()
    for completed, learnt in ((False, (0, 1)), (True, (1, 0))):
        for _ in range(2):
            recorder.begin(order)
        recorder.use(1)
        recorder.end(completed=True)
        assert recorder.depth == 1
        recorder.use(0)
        recorder.end(completed=completed)
        assert recorder.depth == 0
        assert order.units == learnt


@given(learnt=parts, used=parts)
def test_no_order_of_calls_leads_astray(learnt: list[int], used: list[int]) -> None:
    order = ExecutionOrder(learnt)
    recorder = OrderRecorder()
    recorder.begin(order)
    for part in used:
        recorder.use(part)
        assert 0 <= recorder.position <= len(learnt)
        assert part not in learnt or learnt[recorder.position - 1] == part
    recorder.end(completed=True)
    # The same forward again is foreseen from its first part to its last.
    recorder.begin(order)
    for position, part in enumerate(used):
        assert order.units[recorder.position] == part
        recorder.use(part)
        assert recorder.position == position + 1


@given(learnt=parts)
def test_the_last_use_of_a_part_is_known(learnt: list[int]) -> None:
    order = ExecutionOrder(learnt)
    for part in set(learnt):
        position = order.last_position(part)
        assert learnt[position] == part
        assert part not in learnt[position + 1 :]


def uses(order: BackwardOrder, units: tuple[int, ...], *, recomputed: bool = False) -> list[list[int]]:
    """What is expected after each use of a backward that completes."""
    expected: list[list[int]] = []
    for unit in units:
        upcoming, position = order.use(unit, recomputed=recomputed)
        expected.append(list(upcoming[position:]))
    order.end(completed=True)
    return expected


def test_a_backward_is_learnt_from_after_the_same_forward_only() -> None:
    order = BackwardOrder()
    order.forward = ExecutionOrder([0, 1, 2])
    order.use(1, recomputed=False)
    assert order.is_running
    order.end(completed=False)  # which teaches nothing
    assert uses(order, (2, 1)) == [[1, 0], [0]]  # the reverse of its forward
    assert not order.is_running
    order = BackwardOrder()
    order.forward = ExecutionOrder([0, 1, 2])
    assert uses(order, (0, 1, 2), recomputed=True) == [[], [], []]  # nothing is known of recomputation yet
    assert uses(order, (0, 1, 2), recomputed=True) == [[1, 2], [2], []]
    order.forward.learn([2, 0, 1])
    assert uses(order, (1, 0)) == [[0, 2], [2]]
