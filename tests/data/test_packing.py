from typing import Any

import pytest
import torch

from drivetrain_data.packing import Unpacked, pack, take_apart, used_bytes

BATCHES: list[Any] = [
    torch.arange(6).view(2, 3),
    {"x": torch.rand(2), "name": ["a", "b"], "none": None, "half": torch.ones(3, dtype=torch.bfloat16)},
    (torch.tensor(True), [torch.empty(0, 4), torch.rand(4, 4).t()], {"deep": (torch.tensor(1 + 2j), 5)}),
    "text",
    [],
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("capacity", [0, 100_000])
def test_what_is_packed_is_unpacked(capacity: int) -> None:
    step = take_apart("note", BATCHES, tag=7)
    packed, used = pack([step, step], with_layout=True, capacity=capacity)
    assert len(packed) == max(used, capacity)
    assert used_bytes(packed[:64]) == used
    message = Unpacked(packed)
    assert message.layout == step.layout
    assert message.layout.note == "note"
    assert (message.num_steps, message.tags) == (2, [7, 7])
    for number in range(2):
        for index, batch in enumerate(BATCHES):
            assert same(batch, message.batch(message.layout, number, index))


def test_a_layout_that_is_known_is_left_out() -> None:
    step = take_apart(None, [torch.rand(3)])
    packed, used = pack([step], with_layout=False, capacity=0)
    assert used < 128
    message = Unpacked(packed)
    assert message.layout is None
    assert torch.equal(message.batch(step.layout, 0, 0), step.tensors[0])


def test_layouts_differ_by_shape_dtype_structure_and_note() -> None:
    base = take_apart("a", [{"x": torch.ones(2)}]).layout
    assert base == take_apart("a", [{"x": torch.zeros(2)}]).layout
    for note, batch in [
        ("b", {"x": torch.ones(2)}),
        ("a", {"x": torch.ones(3)}),
        ("a", {"x": torch.ones(2).double()}),
        ("a", {"y": torch.ones(2)}),
        ("a", {"x": 1.0}),
    ]:
        assert base != take_apart(note, [batch]).layout
