"""The states of an offloaded tensor, as the table in `residency.py` says them."""

from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain_dispatch.offload import residency as residency_module
from drivetrain_dispatch.offload.residency import OffloadedTensor, Residency, TensorSlot
from drivetrain_dispatch.offload.transfer import TransferRequest, TransferWindow

CPU = torch.device("cpu")
TENSOR_BYTES = 16


def offloaded(module: nn.Module, name: str) -> OffloadedTensor:
    tensor = getattr(module, name)
    request = TransferRequest.of(tensor.detach(), CPU, tensor.dtype)
    return OffloadedTensor(tensor, request, [TensorSlot(ref(module), name, isinstance(tensor, nn.Buffer))])


@pytest.fixture(params=[nn.Parameter, nn.Buffer])
def module(request: pytest.FixtureRequest) -> nn.Module:
    module = nn.Module()
    module.tensor = request.param(torch.ones(4))
    return module


def test_a_tensor_goes_from_stored_to_in_use_and_back(module: nn.Module) -> None:
    residency, tensor = Residency({CPU: TENSOR_BYTES}), offloaded(module, "tensor")
    stored = module.tensor
    assert residency.request([tensor])
    assert not residency.fits([offloaded(nn.Linear(2, 2, bias=False), "weight")])
    assert module.tensor is stored
    residency.acquire([tensor])
    assert list(residency.in_use) == [tensor]
    assert module.tensor is tensor.shown
    assert residency.find_in_use(module.tensor.detach()[1:]) is tensor
    with torch.no_grad():
        module.tensor[0] = 5
    assert stored[0] == 1
    residency.release([tensor])
    assert module.tensor is stored
    assert stored[0] == 5
    assert tensor.transfer is None
    assert not residency.in_use
    assert residency.fits([tensor])


def test_a_window_is_told_of_room_when_the_values_are_gone(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[bool] = []

    class Window(TransferWindow):
        def release(self, size_bytes: int, cancelled: object = None) -> None:
            gone.append(values() is None)
            super().release(size_bytes)

    monkeypatch.setattr(residency_module, "TransferWindow", Window)
    residency, tensor = Residency({CPU: TENSOR_BYTES}), offloaded(module, "tensor")
    residency.request([tensor])
    residency.acquire([tensor])
    values = ref(tensor.transfer.wait()[tensor.index] if tensor.transfer else module.tensor)
    residency.release([tensor])
    assert gone == [True]


def test_what_is_assigned_while_a_buffer_is_in_use_stays() -> None:
    module = nn.Module()
    module.tensor = nn.Buffer(torch.ones(4))
    residency, tensor = Residency({CPU: TENSOR_BYTES}), offloaded(module, "tensor")
    residency.request([tensor])
    residency.acquire([tensor])
    module.tensor = assigned = torch.zeros(4)
    residency.release([tensor])
    assert module.tensor is assigned
    residency.request([tensor])
    residency.acquire([tensor])
    assert module.tensor is assigned
    residency.release([tensor])


@given(steps=st.lists(st.sampled_from(["request", "cancel", "acquire", "release"]), max_size=30))
def test_values_are_there_exactly_while_they_are_claimed_or_used(steps: list[str]) -> None:
    module = nn.Module()
    module.tensor = nn.Parameter(torch.ones(4))
    stored = module.tensor
    residency, tensor = Residency({CPU: TENSOR_BYTES}), offloaded(module, "tensor")
    claims = users = 0
    for step in steps:
        if step == "request":
            assert residency.request([tensor]) == (not claims and not users)
            claims += 1
        elif step == "cancel" and claims:
            residency.cancel([tensor])
            claims -= 1
        elif step == "acquire" and claims:
            residency.acquire([tensor])
            claims, users = claims - 1, users + 1
        elif step == "release" and users:
            residency.release([tensor])
            users -= 1
        assert (tensor.transfer is not None) == (claims + users > 0)
        assert (tensor in residency.in_use) == (module.tensor is not stored) == (users > 0)
        assert (tensor.num_claims, tensor.num_users) == (claims, users)
