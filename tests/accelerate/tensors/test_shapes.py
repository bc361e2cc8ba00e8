"""Batch sizes, structures, slices and joins, beside the installed Accelerate."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from accelerate_sides import assert_alike
from drivetrain_accelerate.tensors import shapes

real: Any = pytest.importorskip("accelerate.utils.operations")

Pair = namedtuple("Pair", "first second")
tensor = torch.tensor


def assert_both(name: str, *args: Any, **kwargs: Any) -> None:
    assert_alike(getattr(real, name), getattr(shapes, name), *args, **kwargs)


def test_the_batch_size_is_that_of_the_first_leaf() -> None:
    two = tensor([1, 2])
    for data in (
        two, [], {}, [1, two], {"a": [tensor([1])]}, (tensor([]),), "a", None,
        BatchEncoding({"a": tensor([1])}), {"a": [], "b": two}, [[], tensor([1])],
    ):  # fmt: skip
        assert_both("find_batch_size", data)
        assert_both("ignorant_find_batch_size", data)


def test_a_tensor_without_dimensions_has_no_batch_size() -> None:
    with pytest.raises(ValueError, match=r"shape \(\) has no batch size"):
        shapes.find_batch_size({"a": tensor(1)})
    assert shapes.ignorant_find_batch_size({"a": tensor(1)}) is None


def test_tensors_of_a_structure_are_made_also_without_dimensions() -> None:
    structure = shapes.get_data_structure({"a": tensor([[1.0]]), "b": (tensor(2), 3)})
    made = shapes.initialize_tensors(structure)
    assert shapes.get_data_structure(made) == structure


def test_slices_are_of_each_tensor_and_joins_keep_the_structure() -> None:
    for data in (tensor([1, 2, 3]), {"a": [tensor([1, 2, 3]), "s"]}):
        assert_both("slice_tensors", data, slice(1, 3))
        assert_both("slice_tensors", data, slice(0, 1), process_index=1, num_processes=2)
    one = tensor([1])
    for data in (
        [{"a": one}, {"a": tensor([2])}], [Pair(one, tensor([2]))] * 2, [[one], [one]],
        [BatchEncoding({"a": one})] * 2, [1, 2], [{"a": one, "b": "s"}] * 2, [torch.ones(2, 1)] * 2,
    ):  # fmt: skip
        assert_both("concatenate", data)
        assert_both("concatenate", data, dim=-1)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([], "the list is empty"),
        ([{"a": tensor([1])}, {"a": tensor([1]), "b": tensor([2])}], "different keys"),
        ([[tensor([1])], [tensor([1]), tensor([2])]], r"lengths \[1, 2\]"),
    ],
    ids=str,
)
def test_structures_that_differ_are_not_joined(data: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        shapes.concatenate(data)


@pytest.mark.parametrize("data", ["words", 1, None, {"a": "x"}, [1, "x"], {"a": [None]}])
def test_a_part_that_holds_no_tensors_comes_back_alone_and_several_are_refused(data: Any) -> None:
    for joined in (real.concatenate, shapes.concatenate):
        assert joined([data]) == data
        with pytest.raises(TypeError, match="tensors"):
            joined([data, data])


def test_a_batch_is_padded_by_repeats_of_its_last_row_as_documented() -> None:
    padded = shapes.pad_input_tensors({"a": torch.arange(5)}, batch_size=5, num_processes=4)
    assert padded["a"].tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    theirs = real.pad_input_tensors({"a": torch.arange(5)}, batch_size=5, num_processes=4)
    assert padded["a"].shape == theirs["a"].shape
    assert shapes.pad_input_tensors(torch.ones(3, 3), 3, 2, dim=1).shape == (3, 4)
    assert_both("pad_input_tensors", torch.arange(4), 4, 2)
    assert_both("pad_input_tensors", {"a": "s"}, 3, 2)
