import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_parallel import AttributeChange, Cut, LayerPlan, ParallelPlan


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    num_units = draw(st.integers(1, 12))
    units = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    return Cut(dim=0, pieces=tuple(unit * num_units for unit in units), num_units=num_units)


@given(cuts(), st.integers(1, 9))
def test_the_ranges_of_all_ranks_are_every_piece_once_and_in_order(cut: Cut, size: int) -> None:
    for index, piece in enumerate(cut.pieces):
        held = [cut.ranges(rank, size)[index] for rank in range(size)]
        start = sum(cut.pieces[:index])
        assert [i for first, last in held for i in range(first, last)] == list(range(start, start + piece))


@given(cuts(), st.integers(1, 9))
def test_the_sizes_are_those_of_the_ranges_and_add_up(cut: Cut, size: int) -> None:
    held = [sum(last - first for first, last in cut.ranges(rank, size)) for rank in range(size)]
    assert list(cut.sizes(size)) == held
    assert sum(held) == cut.num_elements


@given(cuts(), st.integers(1, 9))
def test_no_unit_is_divided_and_ranks_differ_by_one_at_most(cut: Cut, size: int) -> None:
    counts = [last - first for first, last in (cut.units(rank, size) for rank in range(size))]
    assert sum(counts) == cut.num_units
    assert max(counts) - min(counts) <= 1
    for piece in cut.pieces:
        unit = piece // cut.num_units
        assert Cut(dim=0, pieces=(piece,), num_units=cut.num_units).sizes(size) == tuple(
            unit * n for n in counts
        )


def test_33_features_over_4_ranks() -> None:
    assert Cut(dim=0, pieces=(33,), num_units=33).sizes(4) == (8, 8, 8, 9)


def test_queries_keys_and_values_are_each_divided() -> None:
    cut = Cut(dim=0, pieces=(8, 4, 4), num_units=4)
    assert [cut.ranges(rank, 3) for rank in range(3)] == [
        ((0, 2), (8, 9), (12, 13)),
        ((2, 4), (9, 10), (13, 14)),
        ((4, 8), (10, 12), (14, 16)),
    ]


def test_a_piece_that_does_not_consist_of_the_units_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pieces of \(8, 6\) elements do not consist of 4 equal units"):
        Cut(dim=0, pieces=(8, 6), num_units=4)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 9))
def test_the_numbers_of_all_ranks_add_up(unit: int, num_units: int, size: int) -> None:
    change = AttributeChange(
        module="", attribute="num_heads", whole=unit * num_units, num_units=num_units, region="down"
    )
    assert sum(change.of_rank(rank, size) for rank in range(size)) == change.whole


def test_a_plan_divides_nothing_unless_it_is_told() -> None:
    plan = ParallelPlan(size=2)
    assert (plan.layers, plan.attributes, plan.left, plan.random) == ((), (), {}, frozenset())
    assert LayerPlan(name="norm", style="summed").cuts == {}


def test_a_plan_is_that_of_its_regions_and_of_the_layers_outside() -> None:
    names = (("a", "x"), ("head", ""), ("b", "y"), ("c", "x"), ("norm", ""))
    layers = tuple(LayerPlan(name=name, style="summed", region=region) for name, region in names)
    change = AttributeChange(module="a", attribute="n", whole=4, num_units=4, region="x")
    plan = ParallelPlan(size=2, layers=layers, attributes=(change,))
    parts = list(plan.regions())
    assert [[layer.name for layer in part.layers] for part in parts] == [["a", "c"], ["head", "norm"], ["b"]]
    assert [part.attributes for part in parts] == [(change,), (), ()]
    assert list(ParallelPlan(size=2).regions()) == []
