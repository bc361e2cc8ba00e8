from collections import Counter
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.divisions import divided, elements
from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.planning.write_plan import AvailableBoxes, TensorName, plan_writes
from drivetrain_weights.tensor_box import Box, whole


def holding(shape: tuple[int, ...], *boxes: Box) -> AvailableBoxes:
    return AvailableBoxes("F32", 4, shape, boxes)


X = TensorName("state", "x")


@given(st.data(), st.integers(1, 5))
def test_each_element_is_written_once_by_a_rank_that_holds_it(data: st.DataObject, world_size: int) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=5))
    names = [TensorName("state", str(index)) for index in range(len(shapes))]
    ranks: list[dict[TensorName, AvailableBoxes]] = [{} for _ in range(world_size)]
    for name, shape in zip(names, shapes, strict=True):
        for rank, boxes in enumerate(data.draw(divided(shape, world_size))):
            ranks[rank][name] = holding(shape, *boxes)
    plan = plan_writes({name: ranks[0][name] for name in names}, ranks)
    written: Counter[tuple[TensorName, int]] = Counter()
    for rank, entries in enumerate(plan.entries):
        for entry in entries:
            shape = plan.tensors[entry.tensor].shape
            found = elements(shape, entry.box)
            held = {index for box in ranks[rank][entry.tensor].boxes for index in elements(shape, box)}
            assert set(found) <= held
            written.update((entry.tensor, index) for index in found)
    assert written == {
        (name, index): 1 for name, shape in zip(names, shapes, strict=True) for index in range(prod(shape))
    }


def test_what_all_ranks_hold_is_spread_evenly() -> None:
    shapes = [(50_000, 100), (1000, 1000), (1000, 1000), (7,)]
    tensors = {TensorName("state", str(i)): holding(shape, whole(shape)) for i, shape in enumerate(shapes)}
    plan = plan_writes(tensors, [tensors] * 4)
    loads = [sum(entry.box.num_elements for entry in entries) for entries in plan.entries]
    assert max(loads) <= 1.15 * sum(loads) / 4


def test_what_one_rank_alone_holds_counts_in_the_balance() -> None:
    alone, shared = TensorName("state", "alone"), TensorName("state", "shared")
    large = holding((1_000_000,), whole((1_000_000,)))
    plan = plan_writes(
        {alone: large, shared: large},
        [{alone: large, shared: large}, {alone: holding((1_000_000,)), shared: large}],
    )
    assert {entry.tensor for entry in plan.entries[0]} == {alone}
    assert {entry.tensor for entry in plan.entries[1]} == {shared}


def test_one_rank_writes_tensors_whole() -> None:
    large = holding((4_000_000,), whole((4_000_000,)))
    [[entry]] = plan_writes({X: large}, [{X: large}]).entries
    assert entry.box == whole((4_000_000,))


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (holding((5,), Box((3,), (2,))), "is F32 [5] on rank 1 and F32 [6] on rank 0"),
        (holding((6,), Box((4,), (2,))), "the ranks hold 5 of its 6 elements"),
        (holding((6,)), "the ranks hold 3 of its 6 elements"),
        (holding((6,), Box((2,), (3,))), "overlap in part"),
    ],
)
def test_parts_that_are_no_tensor_are_refused(second: AvailableBoxes, said: str) -> None:
    first = holding((6,), Box((0,), (3,)))
    with pytest.raises(StateError, match=r"state: 'x'") as caught:
        plan_writes({X: first}, [{X: first}, {X: second}])
    assert said in str(caught.value)
