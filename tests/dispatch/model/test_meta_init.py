from contextlib import nullcontext
from threading import Barrier

import pytest
import torch
from torch import nn

from dispatch.models import run_threads
from drivetrain_dispatch import find_tied_parameters, init_empty_weights, init_on_device


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.arange(4.0))
        # What many constructors do: plain numbers computed by torch.
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]


@pytest.mark.parametrize("include_buffers", [False, True])
def test_parameters_are_empty_and_buffers_if_asked_and_numbers_never(include_buffers: bool) -> None:
    with init_empty_weights(include_buffers=include_buffers):
        model = WithBuffer()
    assert model.linear.weight.is_meta
    assert model.linear.bias.is_meta
    assert model.frequencies.is_meta is include_buffers
    assert include_buffers or torch.equal(model.frequencies, torch.arange(4.0))
    assert model.rates == [0.0, 0.5, 1.0]
    real, x = WithBuffer(), torch.randn(2, 4)
    model.load_state_dict(real.state_dict(), assign=True)
    assert torch.equal(model.linear(x), real.linear(x))


def test_shapes_dtypes_and_what_needs_gradients_stay() -> None:
    with init_empty_weights():
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        larger_than_any_memory = nn.ModuleList(nn.Linear(50_000, 50_000) for _ in range(20))
    weight = model.weight
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((2, 3), torch.bfloat16, True)
    assert not model.frozen.requires_grad
    assert sum(p.numel() * p.itemsize for p in larger_than_any_memory.parameters()) > 190 * 10**9


def test_afterwards_everything_is_as_before() -> None:
    with pytest.raises(ZeroDivisionError, match="division"), init_empty_weights():
        raise ZeroDivisionError("division")
    assert not nn.Linear(2, 2).weight.is_meta


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embed.weight
        shared = nn.Parameter(torch.ones(2))
        self.left = nn.ParameterList([shared])
        self.right = nn.ParameterList([shared])


def test_ties_hold_however_they_were_made() -> None:
    with init_empty_weights():
        model = Tied()
    assert find_tied_parameters(model) == find_tied_parameters(Tied())
    assert model.left[0] is model.right[0]


def test_models_are_built_on_the_device_that_is_named() -> None:
    with init_on_device("meta"), init_on_device("cpu"):
        inner = nn.Linear(2, 2)
    assert inner.weight.device.type == "cpu"


def test_lazy_modules_and_other_parameter_classes_are_kept() -> None:
    class Scaled(nn.Parameter):
        pass

    with init_empty_weights():
        lazy = nn.LazyLinear(3)
        model = nn.Module()
        special = Scaled(torch.ones(2))
        special.scale = 3.0
        model.weight = special
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert type(model.weight) is Scaled
    assert model.weight.is_meta
    assert model.weight.scale == 3.0


def test_other_threads_are_not_affected() -> None:
    both, built = Barrier(2, timeout=60), dict[int, nn.Module]()

    def build(index: int) -> None:
        with init_empty_weights() if index else nullcontext():
            both.wait()
            built[index] = nn.Linear(4, 4)
            both.wait()

    run_threads(build, 2)
    assert [built[index].weight.is_meta for index in range(2)] == [False, True]


def test_it_decorates_functions() -> None:
    @init_empty_weights()
    def build() -> nn.Module:
        return nn.Linear(2, 2)

    assert build().weight.is_meta
    assert build().weight.is_meta
