import pytest
import torch
from torch import nn

from drivetrain_weights.meta_init import initialise, parameters_on_meta, replace_meta_tensors


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu")


def fill(model: nn.Module, seed: int = 0, around: tuple[nn.Module, ...] = ()) -> nn.Module:
    names = {module: name for name, module in model.named_modules()}
    initialise(replace_meta_tensors(model.modules(), on_cpu), names, around, seed)
    return model


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.MultiheadAttention(4, 2))


def test_inside_building_parameters_have_no_data_and_buffers_do() -> None:
    with parameters_on_meta():
        model = layers()
        tied = nn.Linear(3, 3)
        tied.again = tied.weight
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert tied.again is tied.weight
    assert not nn.Linear(2, 2).weight.is_meta


def test_modules_fill_themselves_as_their_constructors_would() -> None:
    with torch.device("meta"):
        model = layers()
    before = torch.random.get_rng_state()
    fill(model)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(model[1].weight, torch.ones(3))
    assert torch.equal(model[1].running_var, torch.ones(3))
    assert 0 < model[0].weight.abs().max() <= 3**-0.5
    assert torch.equal(model[2].out_proj.bias, torch.zeros(4))


def test_values_depend_on_the_seed_and_the_modules_name_alone() -> None:
    with torch.device("meta"):
        one, other, third = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(3))
    names = {module: name for name, module in other.named_modules()}
    for part in reversed(other):  # in another order
        initialise(replace_meta_tensors([part], on_cpu), names, (), 0)
    assert torch.equal(fill(one)[0].weight, other[0].weight)
    assert not torch.equal(one[0].weight, one[1].weight)
    assert not torch.equal(one[0].weight, fill(third, seed=1)[0].weight)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Pretrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.linear = Own(), nn.Linear(3, 3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Own):
            nn.init.constant_(module.scale, 2.0)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=100.0)


def test_the_models_own_way_comes_after_the_modules() -> None:
    with torch.device("meta"):
        model = Pretrained()
    fill(model, around=(model,))
    assert torch.equal(model.own.scale, torch.full((3,), 2.0))
    assert model.linear.weight.abs().max() > 10


def test_a_module_without_a_way_is_named() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"deep": nn.Sequential(Own())})
    with pytest.raises(
        ValueError, match=r"deep\.0\.scale is on the meta device, and Own has no way to fill it"
    ):
        fill(model)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_a_buffer_that_nothing_fills_is_named(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.ones(3, dtype=dtype, device="meta"))
    with pytest.raises(ValueError, match="mask is on the meta device, and Module has no way"):
        fill(model)


def test_what_a_module_holds_with_values_keeps_them() -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.empty(3, 3, device="meta"))
    bias = model.bias.detach().clone()
    fill(model)
    assert torch.equal(model.bias, bias)
    assert model.weight.abs().max() > 0
