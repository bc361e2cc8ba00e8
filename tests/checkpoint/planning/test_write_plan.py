from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.divisions import divided, elements
from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.format.division import Divisions
from drivetrain_checkpoint.planning.write_plan import AvailableBoxes, Held, TensorName, plan_writes
from drivetrain_weights.tensor_box import Box, whole


def holding(shape: tuple[int, ...], *boxes: Box) -> AvailableBoxes:
    return AvailableBoxes("F32", 4, shape, boxes)


def planned(ranks: Sequence[Mapping[str, AvailableBoxes]]) -> Divisions:
    """The plan for what each rank holds of the tensors of rank 0, by name."""
    names = [TensorName("state", name) for name in ranks[0]]
    held: list[Held] = []
    for rank in ranks:
        kinds = tuple(dict.fromkeys(rank.values()))
        held.append(Held(kinds, array("i", (kinds.index(rank[n]) if n in rank else -1 for _, n in names))))
    return plan_writes(names, held)


def loads(plan: Divisions, num_ranks: int) -> list[int]:
    """The elements that each rank writes."""
    return [
        sum(one.bytes_of(rank) // one.item_bytes for one in plan["state"].values())
        for rank in range(num_ranks)
    ]


@given(st.data(), st.integers(1, 5))
def test_each_element_is_written_once_by_a_rank_that_holds_it(data: st.DataObject, world_size: int) -> None:
    some = data.draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=3))
    shapes = dict(enumerate(data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=6))))
    ranks: list[dict[str, AvailableBoxes]] = [{} for _ in range(world_size)]
    for index, shape in shapes.items():
        for rank, boxes in enumerate(data.draw(divided(shape, world_size))):
            ranks[rank][str(index)] = holding(shape, *boxes)
    plan = planned(ranks)["state"]
    assert list(plan) == [str(index) for index in shapes]
    written: Counter[tuple[str, int]] = Counter()
    for name, division in plan.items():
        for rank, boxes in division.boxes.items():
            held = {i for box in ranks[rank][name].boxes for i in elements(division.shape, box)}
            for box in boxes:
                found = elements(division.shape, box)
                assert set(found) <= held
                written.update((name, index) for index in found)
    assert written == {(str(key), index): 1 for key, shape in shapes.items() for index in range(prod(shape))}


@pytest.mark.parametrize(
    "shapes", [[(50_000, 100), (1000, 1000), (1000, 1000), (7,)], [(300,)] * 101, [(4_000_000,)] * 3]
)
def test_what_all_ranks_hold_is_spread_evenly(shapes: list[tuple[int, ...]]) -> None:
    tensors = {str(index): holding(shape, whole(shape)) for index, shape in enumerate(shapes)}
    found = loads(planned([tensors] * 4), 4)
    assert sum(found) == sum(map(prod, shapes))
    assert max(found) <= 1.15 * sum(found) / 4


def test_what_one_rank_alone_holds_counts_in_the_balance() -> None:
    large = holding((1_000_000,), whole((1_000_000,)))
    plan = planned([{"alone": large, "shared": large}, {"alone": holding((1_000_000,)), "shared": large}])[
        "state"
    ]
    assert {name: list(division.boxes) for name, division in plan.items()} == {"alone": [0], "shared": [1]}


def test_one_rank_writes_tensors_whole() -> None:
    division = planned([{"x": holding((4_000_000,), whole((4_000_000,)))}])["state"]["x"]
    assert division.boxes == {0: (whole((4_000_000,)),)}


def test_tensors_that_are_held_alike_share_a_division_however_many_they_are() -> None:
    halves = [Box((0, 0), (2, 8)), Box((2, 0), (2, 8))]
    ranks = [{str(index): holding((4, 8), half) for index in range(100)} for half in halves]
    [division] = set(planned(ranks)["state"].values())
    assert division.boxes == {0: (halves[0],), 1: (halves[1],)}


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
        planned([{"x": first}, {"x": second}])
    assert said in str(caught.value)
