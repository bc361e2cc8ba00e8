"""Nested tensors, beside the installed Accelerate."""

import pickle
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import BatchEncoding
from transformers.utils import ModelOutput

from accelerate_sides import assert_alike
from drivetrain_accelerate.tensors import nested_tensors
from drivetrain_accelerate.tensors.nested_tensors import recursively_apply, send_to_device

real: Any = pytest.importorskip("accelerate.utils.operations")

Pair = namedtuple("Pair", "first second")
tensor = torch.tensor


@dataclass
class Sample:
    values: Any
    note: Any = None


@dataclass
class Output(ModelOutput):
    loss: Any = None
    logits: Any = None


class Plain:
    """Something that moves, by a `to` that takes the device alone."""

    def to(self, device: Any) -> Any:
        return ("moved", str(device))


class NonBlocking:
    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return ("moved", str(device), non_blocking)


NESTED = {
    "tensor": tensor([1.5]),
    "scalar": tensor(2),
    "list": [tensor([1]), (tensor([2]),)],
    "named tuple": Pair(tensor(1), [tensor(2)]),
    "dict": {"a": tensor([1.0]), "b": {"c": tensor(3)}},
    "ordered": OrderedDict(z=tensor(1), a=tensor(2)),
    "user dict": UserDict(a=tensor([1])),
    "encoding": BatchEncoding({"ids": tensor([[1, 2]])}),
    "model output": Output(loss=tensor(1.0)),
    "other leaves": {"a": "word", "b": 3, "c": None, "d": tensor([1])},
    "empty": [],
    "size": torch.Size([1, 2]),
    "packed": torch.nn.utils.rnn.pack_sequence([torch.ones(2)]),
    "deque": deque([tensor(1)]),
    "half": [tensor([1.5], dtype=torch.float16), tensor([2.5], dtype=torch.bfloat16), tensor([1.0]).double()],
    "bool": [tensor([True, False]), tensor([1], dtype=torch.uint8)],
}


def assert_both(function: Any, *args: Any, **kwargs: Any) -> None:
    assert_alike(getattr(real, function.__name__), function, *args, **kwargs)


@pytest.mark.parametrize("data", NESTED.values(), ids=NESTED.keys())
def test_functions_of_nested_data_return_what_accelerate_returns(data: Any) -> None:
    assert_both(recursively_apply, torch.clone, data, error_on_other_type=True)
    assert_both(recursively_apply, plus_one, data)
    assert_both(send_to_device, data, "meta")
    assert_both(send_to_device, data, "cpu", non_blocking=True)
    for function in (
        nested_tensors.find_device,
        nested_tensors.get_data_structure,
        nested_tensors.get_shape,
        nested_tensors.listify,
    ):
        assert_both(function, data)
    assert_both(nested_tensors.convert_to_fp32, data)


def plus_one(leaf: Any, more: Any = 1, further: Any = 0) -> Any:
    return leaf + more + further


def is_int(leaf: Any) -> bool:
    return isinstance(leaf, int)


def test_arguments_and_the_test_of_leaves_are_handed_on() -> None:
    data = [tensor(1), (2, "x")]
    assert_both(recursively_apply, plus_one, data, 5, further=7)
    assert_both(recursively_apply, plus_one, data, 5, test_type=is_int)


@pytest.mark.parametrize("skip_keys", ["a", ["a", "c"], ("a",), None])
def test_skipped_keys_stay_where_they_are(skip_keys: Any) -> None:
    data = {"a": tensor([1.0]), "b": [{"a": tensor(1), "c": tensor(1)}], "d": Plain(), "e": NonBlocking()}
    assert_both(send_to_device, data, "meta", True, skip_keys)


def test_keys_of_an_encoding_are_skipped_too() -> None:
    data = BatchEncoding({"a": tensor([1]), "b": tensor([2])})
    sent = send_to_device(data, "meta", skip_keys="b")
    assert (type(sent), sent["a"].device.type, sent["b"].device.type) == (BatchEncoding, "meta", "cpu")
    assert data["a"].device.type == "cpu"


def test_dataclasses_are_walked_and_kept_where_nothing_changes() -> None:
    sample = Sample([tensor([1.0])], "a note")
    sent = send_to_device(sample, "meta")
    assert (sent.values[0].device.type, sent.note, sample.values[0].device.type) == ("meta", "a note", "cpu")
    plain = Sample("nothing", "here")
    assert recursively_apply(torch.clone, plain) is plain


def test_a_default_factory_is_kept() -> None:
    found = recursively_apply(torch.neg, defaultdict(list, a=tensor(1)))
    assert found == {"a": tensor(-1)}
    assert found["new"] == []


class Own(MutableMapping[str, Any]):
    """A mapping of the program's own, which is made of another one."""

    def __init__(self, held: Any) -> None:
        self.held = dict(held)

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Any:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def test_a_mapping_of_the_programs_own_is_not_changed() -> None:
    own = Own({"a": tensor(1)})
    assert recursively_apply(torch.neg, own)["a"] == -1
    assert own["a"] == 1


def test_outputs_are_converted_and_the_function_knows_what_it_wraps() -> None:
    def forward(x: Any) -> Any:
        return {"y": x, "n": 1}

    wrapped: Any = nested_tensors.convert_outputs_to_fp32(forward)
    theirs: Any = real.convert_outputs_to_fp32(forward)
    half = tensor([1.5], dtype=torch.float16)
    assert_alike(theirs, wrapped, half)
    assert wrapped.__wrapped__.__wrapped__ is theirs.__wrapped__.__wrapped__ is forward
    with pytest.raises(pickle.PicklingError, match="keep_fp32_wrapper=False"):
        pickle.dumps(nested_tensors.ConvertOutputsToFp32(forward))


def test_kinds_are_told_as_accelerate_tells_them() -> None:
    for value in (*NESTED.values(), torch.return_types.max((1, 2)), torch.nn.Parameter(tensor(1.0)), 1):
        assert nested_tensors.is_namedtuple(value) == real.is_namedtuple(value)
        assert nested_tensors.is_torch_tensor(value) == real.is_torch_tensor(value)
    assert nested_tensors.is_tensor_information(nested_tensors.get_data_structure(tensor([1])))
    assert not nested_tensors.is_torch_xpu_tensor(tensor(1))
    assert nested_tensors.honor_type(Pair(1, 2), iter([3, 4])) == Pair(3, 4)


def assert_named(name: str, *args: Any, **kwargs: Any) -> None:
    assert_alike(getattr(real, name), getattr(nested_tensors, name), *args, **kwargs)


def test_the_batch_size_is_that_of_the_first_leaf() -> None:
    two = tensor([1, 2])
    for data in (
        two, [], {}, [1, two], {"a": [tensor([1])]}, (tensor([]),), "a", None,
        BatchEncoding({"a": tensor([1])}), {"a": [], "b": two}, [[], tensor([1])],
    ):  # fmt: skip
        assert_named("find_batch_size", data)
        assert_named("ignorant_find_batch_size", data)


def test_a_tensor_without_dimensions_has_no_batch_size() -> None:
    with pytest.raises(ValueError, match=r"shape \(\) has no batch size"):
        nested_tensors.find_batch_size({"a": tensor(1)})
    assert nested_tensors.ignorant_find_batch_size({"a": tensor(1)}) is None


def test_tensors_of_a_structure_are_made_also_without_dimensions() -> None:
    structure = nested_tensors.get_data_structure({"a": tensor([[1.0]]), "b": (tensor(2), 3)})
    made = nested_tensors.initialize_tensors(structure)
    assert nested_tensors.get_data_structure(made) == structure


def test_slices_are_of_each_tensor_and_joins_keep_the_structure() -> None:
    for data in (tensor([1, 2, 3]), {"a": [tensor([1, 2, 3]), "s"]}):
        assert_named("slice_tensors", data, slice(1, 3))
        assert_named("slice_tensors", data, slice(0, 1), process_index=1, num_processes=2)
    one = tensor([1])
    for data in (
        [{"a": one}, {"a": tensor([2])}], [Pair(one, tensor([2]))] * 2, [[one], [one]],
        [BatchEncoding({"a": one})] * 2, [1, 2], [{"a": one, "b": "s"}] * 2, [torch.ones(2, 1)] * 2,
    ):  # fmt: skip
        assert_named("concatenate", data)
        assert_named("concatenate", data, dim=-1)


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
        nested_tensors.concatenate(data)


@pytest.mark.parametrize("data", ["words", 1, None, {"a": "x"}, [1, "x"], {"a": [None]}])
def test_a_part_that_holds_no_tensors_comes_back_alone_and_several_are_refused(data: Any) -> None:
    for joined in (real.concatenate, nested_tensors.concatenate):
        assert joined([data]) == data
        with pytest.raises(TypeError, match="tensors"):
            joined([data, data])


def test_a_batch_is_padded_by_repeats_of_its_last_row_as_documented() -> None:
    padded = nested_tensors.pad_input_tensors({"a": torch.arange(5)}, batch_size=5, num_processes=4)
    assert padded["a"].tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    theirs = real.pad_input_tensors({"a": torch.arange(5)}, batch_size=5, num_processes=4)
    assert padded["a"].shape == theirs["a"].shape
    assert nested_tensors.pad_input_tensors(torch.ones(3, 3), 3, 2, dim=1).shape == (3, 4)
    assert_named("pad_input_tensors", torch.arange(4), 4, 2)
    assert_named("pad_input_tensors", {"a": "s"}, 3, 2)
