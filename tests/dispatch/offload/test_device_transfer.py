import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch.models import WIDTH, Coder
from drivetrain_dispatch.errors import OffloadedError
from drivetrain_dispatch.offload.device_transfer import InputMover, move_to_device

META = torch.device("meta")
Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Output:
    logits: Tensor
    name: str = "x"


class Cache:
    def __init__(self) -> None:
        self.keys = torch.ones(1)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensor: [tensor, 1],
        lambda tensor: (tensor, None),
        lambda tensor: Pair(tensor, "x"),
        lambda tensor: {"a": tensor, "b": {"c": [tensor]}},
        lambda tensor: OrderedDict(a=tensor),
        lambda tensor: Output(tensor),
    ],
)
def test_nested_values_move_and_keep_their_kind(wrap: Any) -> None:
    value = wrap(torch.ones(2))
    moved = move_to_device(value, META)
    assert type(moved) is type(value)
    assert {tensor.device for tensor in tensors(moved)} == {META}
    assert {tensor.device for tensor in tensors(value)} == {torch.device("cpu")}
    assert move_to_device(value, torch.device("cpu")) is value


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("transformers.modeling_outputs", "BaseModelOutput"),
        ("diffusers.models.modeling_outputs", "Transformer2DModelOutput"),
    ],
)
def test_outputs_of_libraries_move_and_keep_their_kind(module: str, name: str) -> None:
    value = getattr(pytest.importorskip(module), name)(torch.ones(2))
    moved = move_to_device(value, META)
    assert type(moved) is type(value)
    assert {tensor.device for tensor in tensors(moved)} == {META}
    assert all(getattr(moved, key) is item for key, item in moved.items())
    assert {tensor.device for tensor in tensors(value)} == {torch.device("cpu")}


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Output):
        return [value.logits]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for item in items for tensor in tensors(item)]


def test_what_is_no_container_is_its_owners() -> None:
    cache = Cache()
    assert move_to_device(cache, META) is cache
    assert cache.keys.device.type == "cpu"


class Twice(nn.Module):
    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, cache: Tensor | None = None
    ) -> dict[str, Any]:
        return {"devices": [None if one is None else one.device.type for one in (x, mask, cache)], "y": x * 2}


def test_inputs_follow_their_module_until_the_handles_are_removed() -> None:
    module = Twice()
    handles = InputMover(META, ["cache"], returns=False).attach(module)
    output = module(torch.ones(1), mask=torch.ones(1), cache=torch.ones(1))
    assert output["devices"] == ["meta", "meta", "cpu"]
    assert output["y"].device == META
    for handle in handles:
        handle.remove()
    assert module(torch.ones(1))["devices"] == ["cpu", None, None]


def test_a_model_whose_inputs_follow_is_not_copied() -> None:
    module = Twice()
    handles = InputMover(META, (), returns=True).attach(module)
    with pytest.raises(OffloadedError, match="cannot be copied or pickled as a whole"):
        copy.deepcopy(module)
    for handle in handles:
        handle.remove()
    copy.deepcopy(module)


def test_inputs_of_methods_follow_too() -> None:
    module = Coder().to(META)
    handles = InputMover(META, (), returns=False).attach(module)
    assert module.decode(torch.ones(1, WIDTH), shift=torch.ones(1, WIDTH)).device == META
    for handle in reversed(handles):
        handle.remove()
    assert "decode" not in module.__dict__
    with pytest.raises(RuntimeError, match="device"):
        module.decode(torch.ones(1, WIDTH, device=META), shift=torch.ones(1, WIDTH))


def test_a_method_that_was_replaced_is_left_alone() -> None:
    module = Coder().to(META)
    handles = InputMover(META, (), returns=False).attach(module)
    ours = module.encode
    module.encode = theirs = lambda x: ours(x)
    for handle in reversed(handles):
        handle.remove()
    assert module.encode is theirs
    assert module.encode(torch.ones(1, WIDTH, device=META)).device == META
    with pytest.raises(RuntimeError, match="device"):
        module.encode(torch.ones(1, WIDTH))
