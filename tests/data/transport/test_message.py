from typing import Any

import numpy as np
import pytest
import torch

from drivetrain_data.transport.message import Incoming, Outgoing, longest_bytes, take_apart

BATCHES: list[Any] = [
    torch.arange(6).view(2, 3),
    {"x": torch.rand(2), "name": ["a", "b"], "none": None, "half": torch.ones(3, dtype=torch.bfloat16)},
    (torch.tensor(True), [torch.empty(0, 4), torch.rand(4, 4).t()], {"deep": (torch.tensor(1 + 2j), 5)}),
    [
        torch.arange(10)[::2],
        torch.ones(2, requires_grad=True),
        torch.tensor([1j]).conj(),
        torch.tensor([1j]).conj().imag,
    ],
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


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("spare", [0, 1000])
def test_what_is_written_is_read_back(batch: Any, spare: int) -> None:
    step = take_apart("note", batch)
    outgoing = Outgoing([step, step], [7, 8], loop=1, with_layout=True)
    packed = np.empty(outgoing.used + spare, dtype=np.uint8)
    outgoing.write(packed, longest=outgoing.used + 3)
    assert longest_bytes(packed[:64]) == outgoing.used + 3
    message = Incoming(packed)
    assert message.layout is not None
    assert message.layout.same(step.layout)
    assert message.layout.note == "note"
    assert message.tags == [7, 8]
    assert same(batch, message.batch(message.layout, 0))
    assert same(batch, message.batch(message.layout, 1))


def test_a_layout_that_is_known_is_left_out() -> None:
    step = take_apart(None, torch.rand(3))
    outgoing = Outgoing([step], [0], loop=1, with_layout=False)
    assert outgoing.used < 128
    packed = np.empty(outgoing.used, dtype=np.uint8)
    outgoing.write(packed, longest=outgoing.used)
    message = Incoming(packed)
    assert message.layout is None
    assert torch.equal(message.batch(step.layout, 0), step.tensors[0])


def test_layouts_differ_by_shape_dtype_structure_and_note() -> None:
    base = take_apart("a", {"x": torch.ones(2)}).layout
    assert base.same(take_apart("a", {"x": torch.zeros(2)}).layout)
    for note, batch in [
        ("b", {"x": torch.ones(2)}),
        ("a", {"x": torch.ones(3)}),
        ("a", {"x": torch.ones(2).double()}),
        ("a", {"y": torch.ones(2)}),
        ("a", {"x": 1.0}),
    ]:
        assert not base.same(take_apart(note, batch).layout)
