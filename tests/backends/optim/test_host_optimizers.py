"""Optimizers with states or steps in the host's memory, as far as a machine without CUDA has them."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain_backends.optim.host_optimizers import check_steps_parameters, page_states


class Paged(SGD):
    """Keeps a state as bitsandbytes' paged optimizers do, in memory that it hands out by `get_state_buffer`."""

    is_paged = True

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        for parameter in parameters:
            self.state[parameter] = {"state1": torch.full_like(parameter, 3, dtype=torch.uint8), "step": 2}

    def get_state_buffer(self, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        buffer = torch.zeros_like(parameter, dtype=dtype)
        buffer.is_paged = True
        return buffer


def test_loaded_states_go_back_into_paged_memory() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = Paged([parameter])
    page_states(optimizer)
    state = optimizer.state[parameter]
    assert state["state1"].is_paged
    assert torch.equal(state["state1"], torch.full((4,), 3, dtype=torch.uint8))
    before = state["state1"]
    page_states(optimizer)
    assert state["state1"] is before  # once
    assert state["step"] == 2


def test_bitsandbytes_hand_out_the_buffers_that_this_relies_on() -> None:
    optim = pytest.importorskip("bitsandbytes.optim")
    parameter = nn.Parameter(torch.ones(128, 64))
    optimizer = optim.PagedAdamW8bit([parameter])
    parameter.grad = torch.ones_like(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # on the CPU there is no paged memory, which it says
        optimizer.step()
        before = {key: optimizer.state[parameter][key].clone() for key in ("state1", "state2")}
        page_states(optimizer)
    assert optimizer.is_paged
    for key, value in before.items():
        assert torch.equal(optimizer.state[parameter][key], value)


def test_others_are_left_alone() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(4)
    optimizer.step()
    momentum = optimizer.state[parameter]["momentum_buffer"]
    page_states(optimizer)
    check_steps_parameters([optimizer])
    assert optimizer.state[parameter]["momentum_buffer"] is momentum
