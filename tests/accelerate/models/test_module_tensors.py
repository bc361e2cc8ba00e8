"""Tensors of modules, held against the installed Accelerate."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_accelerate.models import align_devices, module_tensors

theirs = pytest.importorskip("accelerate.utils.modeling")
both = pytest.mark.parametrize(
    "room", [pytest.param(module_tensors, id="ours"), pytest.param(theirs, id="theirs")]
)


@pytest.fixture
def model() -> Any:
    built = nn.ModuleDict({"layer": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3)})
    built.register_buffer("mask", torch.ones(2), persistent=False)
    return built


def test_tensors_are_listed_alike(model: Any) -> None:
    for buffers, recurse, persistent in product((True, False), repeat=3):
        mine, real = (
            (
                [name for name, _ in room.named_module_tensors(model, buffers, recurse, persistent)],
                room.get_non_persistent_buffers(model, recurse),
            )
            for room in (module_tensors, theirs)
        )
        assert mine == real


@both
def test_a_tensor_is_put_on_a_device(room: Any, model: Any) -> None:
    put, layer, norm, before = room.set_module_tensor_to_device, *model.values(), model["layer"].bias
    put(model, "layer.weight", "meta")
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.is_meta
    for name, value, said in (
        ("layer.weight", None, "on the meta device"),
        ("layer.weight", torch.ones(2, 2), "shape"),
        ("layer.other", None, "other"),
    ):
        with pytest.raises(ValueError, match=said):
            put(model, name, "cpu", value=value)
    put(model, "layer.weight", "cpu", value=torch.ones(3, 2, dtype=torch.float16))
    assert (layer.weight.dtype, layer.weight.requires_grad) == (torch.float32, True)
    put(model, "layer.weight", "cpu", value=torch.zeros(3, 2), dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    put(model, "norm.running_mean", "cpu", value=torch.ones(3))
    assert torch.equal(norm.running_mean, torch.ones(3))
    put(model, "layer.bias", "cpu")
    assert layer.bias is before


def test_tied_tensors_are_copied_once() -> None:
    weight, layers = nn.Parameter(torch.ones(2, 2)), (nn.Linear(2, 2), nn.Linear(2, 2))
    copies: dict[int, dict[torch.device, Any]] = {weight.data_ptr(): {}}
    for layer in layers:
        module_tensors.set_module_tensor_to_device(
            layer, "weight", "cpu", value=weight, tied_params_map=copies
        )
    assert layers[0].weight is layers[1].weight is copies[weight.data_ptr()][torch.device("cpu")]


@both
@pytest.mark.default_cases("ours")
def test_devices_and_memory_are_compared(room: Any, model: Any) -> None:
    cpu, cuda, first, second = map(torch.device, ("cpu", "cuda", "cuda:0", "cuda:1"))
    for one, other, same in (
        (cpu, cpu, True), (cuda, first, True), (cpu, first, False), (first, second, False),
    ):  # fmt: skip
        assert room.check_device_same(one, other) == same
    tensor = torch.ones(3)
    assert room.id_tensor_storage(tensor) == (tensor.device, tensor.data_ptr(), 12)
    assert room.is_peft_model(model) is False


def test_a_dtype_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="no dtype of torch is called so"):
        module_tensors.dtype_of("float3")
    assert module_tensors.dtype_of("torch.float16") == torch.float16


def test_offloaded_weights_are_there_within_a_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    assert not align_devices.has_offloaded_params(model[0])
    before = model[0].weight
    with align_devices.align_module_device(
        model[0], torch.device("cpu")
    ):  # without a hook it stays what it is
        assert model[0].weight is before
    assert model[0].weight is before
    align_devices.attach_align_device_hook(model, torch.device("cpu"), offload=True)
    assert align_devices.has_offloaded_params(model[0])
    with align_devices.align_module_device(model[0]):
        assert torch.equal(model[0].weight, plain["0.weight"])
    assert model[0].weight.is_meta
    held = align_devices.get_state_dict_offloaded_model(model)
    assert held.keys() == plain.keys()
    assert all(torch.equal(held[name], value) for name, value in plain.items())
    filled: Any = align_devices.get_state_dict_from_offload(model[1], "1.weight", {"1.weight": ""})
    assert torch.equal(filled["1.weight"], plain["1.weight"])
