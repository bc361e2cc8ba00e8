from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from drivetrain_precision.nested_tensors import cast_floating, floating_tensors


class Pair(NamedTuple):
    first: Tensor
    second: object


@dataclass(frozen=True)
class Output:
    loss: Tensor
    states: tuple[Tensor, ...] = ()


def test_floating_tensors_of_any_structure_are_cast_and_the_rest_stays() -> None:
    value = OrderedDict(
        a=[torch.ones(2), "text"],
        b=Pair(torch.ones(2, dtype=torch.float64), torch.arange(2)),
        c=Output(torch.ones(()), (torch.ones(1), torch.ones(1, dtype=torch.complex64))),
    )
    found = cast_floating(value, torch.bfloat16)
    assert type(found) is OrderedDict
    assert (found["a"][0].dtype, found["a"][1]) == (torch.bfloat16, "text")
    assert (found["b"].first.dtype, found["b"].second.dtype) == (torch.bfloat16, torch.int64)
    assert type(found["c"]) is Output
    assert [t.dtype for t in (found["c"].loss, *found["c"].states)] == [torch.bfloat16] * 2 + [
        torch.complex64
    ]
    assert value["a"][0].dtype is torch.float32


def test_only_the_named_dtypes_are_cast() -> None:
    found = cast_floating((torch.ones(1), torch.ones(1).half()), torch.float64, only=(torch.float16,))
    assert [tensor.dtype for tensor in floating_tensors(found)] == [torch.float32, torch.float64]


def test_the_output_of_transformers_keeps_its_kind() -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_outputs import CausalLMOutput

    found = cast_floating(CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2)), torch.bfloat16)
    assert type(found) is CausalLMOutput
    assert found.logits is found["logits"]
    assert found.logits.dtype is torch.bfloat16
