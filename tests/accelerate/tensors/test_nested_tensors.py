"""Nested tensors, beside the installed Accelerate."""

import pickle
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import BatchEncoding
from transformers.utils import ModelOutput

from drivetrain_accelerate.tensors import nested_tensors, shapes

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


def shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


def assert_both(name: str, ours: Any, *args: Any, **kwargs: Any) -> None:
    """Check that Accelerate's function and ours return the same, or raise an error of the same class."""
    results: list[str] = []
    for function in (getattr(real, name), ours):
        try:
            # Transformers' encodings move themselves in place.
            results.append(shown(function(*deepcopy(args), **kwargs)))
        except (TypeError, ValueError, AttributeError) as error:
            results.append(type(error).__name__)
    assert results[0] == results[1]


@pytest.mark.parametrize("data", NESTED.values(), ids=NESTED.keys())
def test_functions_of_nested_data_return_what_accelerate_returns(data: Any) -> None:
    assert_both("recursively_apply", nested_tensors.recursively_apply, lambda leaf: leaf + 1, data)
    assert_both(
        "recursively_apply", nested_tensors.recursively_apply, torch.clone, data, error_on_other_type=True
    )
    assert_both("send_to_device", nested_tensors.send_to_device, data, "meta")
    assert_both("send_to_device", nested_tensors.send_to_device, data, "cpu", non_blocking=True)
    assert_both("find_device", nested_tensors.find_device, data)
    assert_both("get_data_structure", shapes.get_data_structure, data)
    assert_both("get_shape", shapes.get_shape, data)
    assert_both("listify", shapes.listify, data)
    assert_both("convert_to_fp32", shapes.convert_to_fp32, data)


def test_arguments_and_the_test_of_leaves_are_handed_on() -> None:
    def add(leaf: Any, other: Any, more: Any = 0) -> Any:
        return leaf + other + more

    data = [tensor(1), (2, "x")]
    assert_both("recursively_apply", nested_tensors.recursively_apply, add, data, 5, more=7)
    assert_both(
        "recursively_apply",
        nested_tensors.recursively_apply,
        add,
        data,
        5,
        test_type=lambda leaf: isinstance(leaf, int),
    )


@pytest.mark.parametrize("skip_keys", ["a", ["a", "c"], ("a",), None])
def test_skipped_keys_stay_where_they_are(skip_keys: Any) -> None:
    data = {"a": tensor([1.0]), "b": [{"a": tensor(1), "c": tensor(1)}], "d": Plain(), "e": NonBlocking()}
    assert_both("send_to_device", nested_tensors.send_to_device, data, "meta", True, skip_keys)


def test_keys_of_an_encoding_are_skipped_too() -> None:
    data = BatchEncoding({"a": tensor([1]), "b": tensor([2])})
    sent = nested_tensors.send_to_device(data, "meta", skip_keys="b")
    assert (type(sent), sent["a"].device.type, sent["b"].device.type) == (BatchEncoding, "meta", "cpu")
    assert data["a"].device.type == "cpu"


def test_dataclasses_are_walked_and_kept_where_nothing_changes() -> None:
    sample = Sample([tensor([1.0])], "a note")
    sent = nested_tensors.send_to_device(sample, "meta")
    assert (sent.values[0].device.type, sent.note, sample.values[0].device.type) == ("meta", "a note", "cpu")
    plain = Sample("nothing", "here")
    assert nested_tensors.recursively_apply(torch.clone, plain) is plain


def test_a_default_factory_is_kept() -> None:
    found = nested_tensors.recursively_apply(torch.neg, defaultdict(list, a=tensor(1)))
    assert found == {"a": tensor(-1)}
    assert found["new"] == []


def test_a_mapping_of_the_programs_own_is_not_changed() -> None:
    class Own(MutableMapping[str, Any]):
        def __init__(self, items: Any) -> None:
            self.items_ = dict(items)

        def __getitem__(self, key: str) -> Any:
            return self.items_[key]

        def __setitem__(self, key: str, value: Any) -> None:
            self.items_[key] = value

        def __delitem__(self, key: str) -> None:
            del self.items_[key]

        def __iter__(self) -> Any:
            return iter(self.items_)

        def __len__(self) -> int:
            return len(self.items_)

    own = Own({"a": tensor(1)})
    assert nested_tensors.recursively_apply(torch.neg, own)["a"] == -1
    assert own["a"] == 1


def test_outputs_are_converted_and_the_function_knows_what_it_wraps() -> None:
    def forward(x: Any) -> Any:
        return {"y": x, "n": 1}

    wrapped: Any = shapes.convert_outputs_to_fp32(forward)
    theirs: Any = real.convert_outputs_to_fp32(forward)
    half = tensor([1.5], dtype=torch.float16)
    assert shown(wrapped(half)) == shown(theirs(half))
    assert wrapped.__wrapped__.__wrapped__ is theirs.__wrapped__.__wrapped__ is forward
    with pytest.raises(pickle.PicklingError, match="keep_fp32_wrapper=False"):
        pickle.dumps(shapes.ConvertOutputsToFp32(forward))


def test_kinds_are_told_as_accelerate_tells_them() -> None:
    for value in (*NESTED.values(), torch.return_types.max((1, 2)), torch.nn.Parameter(tensor(1.0)), 1):
        assert nested_tensors.is_namedtuple(value) == real.is_namedtuple(value)
        assert nested_tensors.is_torch_tensor(value) == real.is_torch_tensor(value)
    assert nested_tensors.is_tensor_information(shapes.get_data_structure(tensor([1])))
    assert not nested_tensors.is_torch_xpu_tensor(tensor(1))
    assert nested_tensors.honor_type(Pair(1, 2), iter([3, 4])) == Pair(3, 4)
