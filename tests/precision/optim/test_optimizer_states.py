"""In how many bits optimizers keep their states, for optimizers of three libraries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_precision import is_low_bit, optimizer_states

SHAPES = ((128, 64), (65, 64), (64,), (8, 64))


def stepped(make: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    return optimizer


def test_torchs_own_keep_all_in_floating_point_without_a_reason() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4))])
    assert str(optimizer_states(optimizer)) == "AdamW: no states yet"
    states = optimizer_states(stepped(torch.optim.AdamW))
    assert not is_low_bit(optimizer)
    assert (states.num_low_bit, states.num_floating, states.reasons) == (0, 4, {})
    assert states.size_bytes == states.elements * 8 + 4 * 4  # and the steps


@pytest.mark.parametrize(("name", "bits"), [("AdamW8bit", 16.25), ("AdamW4bit", 8.5), ("AdamWFp8", 16.25)])
def test_torchaos_tell_what_is_small_and_what_has_no_whole_blocks(name: str, bits: float) -> None:
    optim = pytest.importorskip("torchao.optim")
    optimizer = stepped(lambda parameters: getattr(optim, name)(parameters))
    assert is_low_bit(optimizer)
    states = optimizer_states(optimizer)
    block = optimizer.block_size
    assert (states.num_low_bit, states.num_floating, states.elements_low_bit) == (1, 3, 8192)
    assert states.reasons == {
        "of fewer than 4096 elements": 2,
        f"of no whole number of blocks of {block}": 1,  # 4160 elements
    }
    alone = nn.Parameter(torch.ones(1024, 64))
    alone.grad = torch.ones_like(alone)
    optimizer = getattr(optim, name)([alone])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    states = optimizer_states(optimizer)
    assert 8 * states.size_bytes / states.elements == pytest.approx(bits, abs=0.3)


def test_torchaos_without_blocks_is_no_low_bit_optimizer() -> None:
    optim = pytest.importorskip("torchao.optim")
    assert not is_low_bit(optim._AdamW([nn.Parameter(torch.ones(4))]))


def test_bitsandbytes_tell_their_own_least_size() -> None:
    optim = pytest.importorskip("bitsandbytes.optim")
    states = optimizer_states(stepped(lambda parameters: optim.AdamW8bit(parameters, min_8bit_size=500)))
    assert (states.num_low_bit, states.reasons) == (3, {"of fewer than 500 elements": 1})
    assert not is_low_bit(optim.AdamW32bit([nn.Parameter(torch.ones(4))]))


def test_a_state_that_was_loaded_in_fp32_is_named() -> None:
    optim = pytest.importorskip("torchao.optim")
    optimizer = stepped(optim.AdamW8bit)
    large = optimizer.param_groups[0]["params"][0]
    optimizer.state[large]["exp_avg"] = torch.zeros(128, 64)
    optimizer.state[large]["exp_avg_sq"] = torch.zeros(128, 64)
    assert optimizer_states(optimizer).reasons["loaded or overridden so"] == 1
    assert "0 of 4 parameters (0 % of elements) in 8 bits or fewer" in str(optimizer_states(optimizer))
