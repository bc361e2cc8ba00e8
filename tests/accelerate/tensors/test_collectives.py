"""Collectives on two ranks, beside the installed Accelerate's in the same processes."""

import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_accelerate.tensors import rank_collectives as ours
from drivetrain_accelerate.tensors.rank_collectives import chained_operation, verify_operation

pytest.importorskip("accelerate")

Pair = namedtuple("Pair", "first second")
tensor = torch.tensor


@dataclass
class Sample:
    values: Any


def _cases(rank: int) -> dict[str, Any]:
    """Return calls whose results are the same in both: the name, the arguments."""
    from transformers import BatchEncoding

    nested = {"a": tensor([rank]), "b": (tensor(rank), Pair(tensor([rank]), tensor([[rank, 1]])))}
    wide = torch.ones(rank + 1, 2)
    return {
        "gather": ("gather", [tensor([rank])], {}),
        "gather of scalars": ("gather", [tensor(rank)], {}),
        "gather of bools": ("gather", [tensor([bool(rank)])], {}),
        "gather of bfloat16": ("gather", [tensor([rank], dtype=torch.bfloat16)], {}),
        "gather of nested": ("gather", [nested], {}),
        "gather of an encoding": ("gather", [BatchEncoding({"a": tensor([rank])})], {}),
        "gather of nothing": ("gather", [[]], {}),
        "gather of a transposed": ("gather", [torch.arange(6).view(2, 3).t()], {}),
        "gather of empty": ("gather", [torch.ones(0, 3)], {}),
        "objects": ("gather_object", [[rank, "a"]], {}),
        "objects of a tuple": ("gather_object", [(rank,)], {}),
        "tensors as objects": ("gather_object", [[tensor([rank]), {"a": tensor(rank)}]], {}),
        "objects of a tensor": ("gather_object", [tensor([rank, 7])], {}),
        "mean": ("reduce", [tensor([rank + 1.0])], {}),
        "sum": ("reduce", [{"a": [tensor(rank + 1.0)], "b": tensor([rank])}, "sum"], {}),
        "mean of float16": ("reduce", [tensor([rank + 1.0]).half(), "mean"], {}),
        "sum of ints": ("reduce", [tensor([rank + 1, 3]), "sum", 2], {}),
        "sum of bools": ("reduce", [tensor([bool(rank), False]), "sum"], {}),
        "broadcast": ("broadcast", [{"a": tensor([rank]), "b": [tensor(rank)]}, 1], {}),
        "object list": ("broadcast_object_list", [[rank, "a"], 1], {}),
        "pad": ("pad_across_processes", [torch.ones(2, rank + 1)], {"dim": 1, "pad_index": -1}),
        "pad first": ("pad_across_processes", [{"a": wide}], {"pad_index": -1, "pad_first": True}),
        "pad a last dim": ("pad_across_processes", [torch.ones(2, rank + 1)], {"dim": -1}),
        "pad a dim that is not there": ("pad_across_processes", [[torch.ones(2), tensor(1)]], {"dim": 3}),
        "pad ints": ("pad_across_processes", [torch.ones(rank + 1).int()], {"pad_index": -100}),
        "pad one dim of several that differ": ("pad_across_processes", [torch.ones(rank + 1, rank + 2)], {}),
        "pad lists": ("pad_across_processes", [[torch.ones(rank + 1), (torch.ones(rank + 2),)]], {}),
        "pad nothing to something": ("pad_across_processes", [torch.ones(2 * rank)], {}),
        "words": ("gather", [{"a": "s"}], {}),
        "words to pad": ("pad_across_processes", [{"a": "s"}], {}),
    }


def _outcomes(module: Any, rank: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, (function, args, kwargs) in _cases(rank).items():
        try:
            value = getattr(module, function)(*args, **kwargs)
            found[name] = f"{type(value).__name__} {value!r} {args[0]!r}"
        except TypeError:
            found[name] = "TypeError"
    return found


def _beside() -> tuple[dict[str, str], dict[str, str]]:
    from accelerate.utils import operations as real

    from accelerate import PartialState as RealState

    state = PartialState(cpu=True)
    try:
        mine = _outcomes(ours, state.process_index)
        RealState(cpu=True)
        theirs = _outcomes(real, state.process_index)
        return mine, theirs
    finally:
        RealState._reset_state()
        PartialState._reset_state()


def test_results_are_those_of_accelerate(run_ranks: Any) -> None:
    for mine, theirs in run_ranks(_beside):
        assert mine == theirs


def _describe_outcome(call: Any) -> str:
    try:
        return repr(call())
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def _alone() -> dict[str, str]:

    state, o = PartialState(cpu=True), ours
    rank = state.process_index
    filled = tensor([rank])
    found = o.gather_object([{"a": [tensor([rank])]}])
    try:
        o.broadcast(filled, 1)
        calls = {
            "uneven gather": lambda: o.gather({"x": torch.ones(rank + 1)}),
            "uneven reduce": lambda: o.reduce(torch.ones(rank + 1)),
            "other dtype": lambda: o.gather(torch.ones(1) if rank else torch.ones(1).int()),
            "other call": lambda: o.gather(torch.ones(1)) if rank else o.reduce(torch.ones(1)),
            "other structure": lambda: o.broadcast([torch.ones(1)] * (rank + 1)),
            "other dimensions": lambda: o.pad_across_processes(torch.ones(*[1] * (rank + 1))),
            "after errors": lambda: o.gather(tensor([rank])),
            "dict of objects": lambda: o.gather_object({"a": rank}),
            "word of objects": lambda: o.gather_object("ab"),
            "one object": lambda: o.gather_object(rank),
            "mean of ints": lambda: o.reduce(tensor([rank + 1, 3])),
            "none": lambda: o.reduce(tensor([float(rank)]), "none")[0].item() == rank,
            "max": lambda: o.reduce(tensor([rank + 1.0]), "max"),
            "unknown": lambda: o.reduce(tensor([1.0]), "product"),
            "no rank": lambda: o.broadcast(tensor([1]), 7),
            "a tuple": lambda: o.broadcast_object_list((1,)),
            "a fraction": lambda: o.pad_across_processes(torch.ones(rank + 1).int(), pad_index=1.5),
            "bools": lambda: o.pad_across_processes(torch.ones(rank + 1).bool())[0].dtype,
            "dataclass": lambda: o.gather(Sample(tensor([rank]))),
            "none leaf": lambda: o.gather([None, tensor([rank])]),
            "shape": lambda: o.gather_tensor_shape(torch.ones(1, 2) if rank else None),
            "copied": lambda: o.copy_tensor_to_devices(None if rank else torch.tensor([1.0, 2.0])),
            "copied twice": lambda: o.copy_tensor_to_devices(torch.ones(1)),
            "in place": lambda: filled,
            "objects of tensors": lambda: found,
            "chained": lambda: chained_operation(_chained)(torch.ones(rank + 1)),
            "nested kind": lambda: _padded_nested(o),
        }
        return {name: _describe_outcome(call) for name, call in calls.items()}
    finally:
        PartialState._reset_state()


def _chained(values: Any) -> Any:
    return ours.gather(values)


def _padded_nested(o: Any) -> Any:
    kept = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        padded = o.pad_across_processes([kept, torch.ones(1)])
    return padded[0] is kept, [each.category.__name__ for each in caught]


SAID = {
    "uneven gather": (
        "rank 0: gather of data['x']: float32 (1,)",
        "rank 1: gather of data['x']: float32 (2,)",
    ),
    "uneven reduce": ("DistributedOperationException", "pad_across_processes first"),
    "other dtype": ("int32 (1,)", "float32 (1,)"),
    "other call": ("rank 0: reduce(reduction='mean')", "rank 1: gather"),
    "other structure": ("DistributedOperationException", "data[1]"),
    "other dimensions": ("(-1,)", "(-1, -1)"),
    "after errors": ("tensor([0, 1])",),
    "dict of objects": ("TypeError: gather_object of a dict: give it a list",),
    "word of objects": ("TypeError: gather_object of a str: give it a list",),
    "one object": ("TypeError: gather_object of a int",),
    "mean of ints": ("ValueError", "convert to a float dtype first"),
    "none": ("True",),
    "max": ("tensor([2.])",),
    "unknown": ("ValueError: reduction='product': say one of",),
    "no rank": ("ValueError: src=7",),
    "a tuple": ("TypeError: broadcast_object_list fills a list",),
    "a fraction": ("ValueError: pad_index=1.5 for a tensor of torch.int32",),
    "bools": ("torch.bool",),
    "dataclass": ("Sample(values=tensor([0, 1]))",),
    "none leaf": ("[None, tensor([0, 1])]",),
    "shape": ("(tensor([[1],\n        [2]], dtype=torch.int32), 1)",),
    "copied": ("tensor([1., 2.])",),
    "copied twice": ("ValueError: one rank must have the tensor", "0, 1"),
    "in place": ("tensor([1])",),
    "objects of tensors": ("[{'a': [tensor([0])]}, {'a': [tensor([1])]}]",),
    "chained": ("DistributedOperationException: in ", "_chained: the ranks do not make the same call"),
    "nested kind": ("(True, ['CannotPadNestedTensorWarning'])",),
}


def test_what_accelerate_does_wrong_is_right_or_an_error(run_ranks: Any) -> None:
    for of_rank in run_ranks(_alone):
        assert of_rank.keys() == SAID.keys()
        for name, parts in SAID.items():
            for part in parts:
                assert part in of_rank[name], (name, of_rank[name])


def _verified() -> list[str]:
    from drivetrain_config import environ

    with environ.exported(DRIVETRAIN_STATE__DEBUG="true"):
        state = PartialState(cpu=True)
    try:
        own = verify_operation(_own)
        size = state.process_index + 1
        return [
            _describe_outcome(lambda: own(torch.ones(size))),
            _describe_outcome(lambda: own(tensor=torch.ones(size))),
            _describe_outcome(lambda: own(torch.ones(2, device="meta"))),
            _describe_outcome(lambda: own(torch.ones(2))),
        ]
    finally:
        PartialState._reset_state()


def _own(tensor: Any) -> Any:
    return tensor


def test_a_programs_own_operation_is_verified_in_debug_mode(run_ranks: Any) -> None:
    for uneven, named, elsewhere, same in run_ranks(_verified):
        assert "DistributedOperationException" in uneven
        assert "float32 (2,)" in named
        assert "on meta, while this process computes on cpu" in elsewhere
        assert same == "tensor([1., 1.])"


def test_a_single_process_gets_its_data_back() -> None:

    o = ours
    PartialState(cpu=True)
    try:
        data = {"a": "s", "b": tensor(1)}
        assert o.gather(data) is o.broadcast(data) is o.gather_object(data) is data
        assert o.broadcast_object_list((1,)) == (1,)
        assert o.pad_across_processes([tensor(1)]) == [tensor(1)]
        own = tensor([1, 3])
        reduced = o.reduce(own)
        assert reduced.tolist() == [1, 3]
        assert reduced is not own
        with pytest.raises(TypeError, match="got a leaf of"):
            o.reduce({"a": "s"})
        assert o.copy_tensor_to_devices(tensor([1.0])).tolist() == [1.0]
    finally:
        PartialState._reset_state()


def test_parameters_that_nobody_divided_are_whole_already() -> None:

    layer = torch.nn.Linear(1, 1)
    with ours.GatheredParameters(layer.parameters(), modifier_rank=0):
        assert layer.weight.numel() == 1
