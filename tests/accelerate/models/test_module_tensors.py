"""Tensors of modules, held against the installed Accelerate."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_accelerate.models import align_devices, attached_hooks, module_tensors

theirs = pytest.importorskip("accelerate.utils.modeling")
both = pytest.mark.parametrize(
    "room", [pytest.param(module_tensors, id="ours"), pytest.param(theirs, id="theirs")]
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(2), persistent=False)


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_tensors_are_listed_alike(buffers: bool, recurse: bool, persistent: bool) -> None:
    model = Model()
    mine, real = (
        [name for name, _ in room.named_module_tensors(model, buffers, recurse, persistent)]
        for room in (module_tensors, theirs)
    )
    assert mine == real
    assert module_tensors.get_non_persistent_buffers(model, recurse) == theirs.get_non_persistent_buffers(
        model, recurse
    )


@both
def test_a_tensor_is_put_on_a_device(room: Any) -> None:
    model = Model()
    put = room.set_module_tensor_to_device
    put(model, "layer.weight", "meta")
    assert isinstance(model.layer.weight, nn.Parameter)
    assert model.layer.weight.is_meta
    with pytest.raises(ValueError, match="on the meta device"):
        put(model, "layer.weight", "cpu")
    put(model, "layer.weight", "cpu", value=torch.ones(3, 2, dtype=torch.float16))
    assert model.layer.weight.dtype == torch.float32
    assert model.layer.weight.requires_grad
    put(model, "layer.weight", "cpu", value=torch.zeros(3, 2), dtype=torch.bfloat16)
    assert model.layer.weight.dtype == torch.bfloat16
    put(model, "norm.running_mean", "cpu", value=torch.ones(3))
    assert torch.equal(model.norm.running_mean, torch.ones(3))
    with pytest.raises(ValueError, match="other"):
        put(model, "layer.other", "cpu")
    with pytest.raises(ValueError, match="shape"):
        put(model, "layer.weight", "cpu", value=torch.ones(2, 2))
    before = model.layer.bias
    put(model, "layer.bias", "cpu")
    assert model.layer.bias is before


def test_a_dtype_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="no dtype of torch is called so"):
        module_tensors.dtype_of("float3")
    assert module_tensors.dtype_of("torch.float16") == torch.float16


@both
def test_devices_and_memory_are_compared(room: Any) -> None:
    cpu, cuda, first = torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 0)
    assert room.check_device_same(cpu, cpu)
    assert room.check_device_same(cuda, first)
    assert not room.check_device_same(cpu, first)
    assert not room.check_device_same(first, torch.device("cuda", 1))
    tensor = torch.ones(3)
    assert room.id_tensor_storage(tensor) == (tensor.device, tensor.data_ptr(), 12)
    assert room.is_peft_model(Model()) is False


def test_offloaded_weights_are_there_within_a_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    assert not align_devices.has_offloaded_params(model[0])
    attached_hooks.attach_align_device_hook(model, torch.device("cpu"), offload=True)
    assert align_devices.has_offloaded_params(model[0])
    with align_devices.align_module_device(model[0]):
        assert torch.equal(model[0].weight, plain["0.weight"])
    assert model[0].weight.is_meta
    held = align_devices.get_state_dict_offloaded_model(model)
    assert held.keys() == plain.keys()
    assert all(torch.equal(held[name], value) for name, value in plain.items())
    filled = align_devices.get_state_dict_from_offload(model[1], "1.weight", {"1.weight": ""})
    assert torch.equal(filled["1.weight"], plain["1.weight"])  # type: ignore[arg-type]


def test_a_module_without_a_hook_stays_what_it_is() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight
    with align_devices.align_module_device(layer, torch.device("cpu")):
        assert layer.weight is before
    assert layer.weight is before
