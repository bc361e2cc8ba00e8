from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_weights.tensor_box import Box, boxes_of_range, overlap, whole

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def indices(shape: tuple[int, ...], box: Box) -> list[int]:
    """The elements of a box, as indices into the flattened tensor."""
    return np.atleast_1d(np.arange(prod(shape)).reshape(shape)[box.slices()]).ravel().tolist()


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@given(shapes, st.data())
def test_a_range_is_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    found = list(boxes_of_range(shape, start, stop))
    assert [index for box in found for index in indices(shape, box)] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_an_overlap_is_what_both_hold(shape: tuple[int, ...], data: st.DataObject) -> None:
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = set(indices(shape, one)) & set(indices(shape, other))
    found = overlap(one, other)
    assert common == (set() if found is None else set(indices(shape, found)))
    assert (found is None) == (not common)


@given(shapes, st.data())
def test_pieces_of_a_box_are_the_box_and_not_too_large(shape: tuple[int, ...], data: st.DataObject) -> None:
    box, most = data.draw(boxes(shape)), data.draw(st.integers(1, 30))
    pieces = list(box.cut(most))
    assert sorted(index for piece in pieces for index in indices(shape, piece)) == indices(shape, box)
    row = prod(box.sizes[1:]) if box.sizes and box.sizes[0] > 1 else box.num_elements
    assert all(piece.num_elements <= max(most, row) for piece in pieces)


@given(shapes)
def test_slices_within_a_box_begin_at_its_corner(shape: tuple[int, ...]) -> None:
    assert whole(shape).slices(within=whole(shape)) == whole(shape).slices()
    assert Box((3, 4), (2, 2)).slices(within=Box((2, 4), (5, 6))) == (slice(1, 3), slice(0, 2))


@given(shapes, st.data())
def test_a_box_is_a_range_where_it_says_so(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(boxes(shape))
    found = box.flat_range(shape)
    if found is not None:
        assert indices(shape, box) == list(range(*found))
    else:
        assert box.sizes[1:] != shape[1:]
