"""Run by `tools/check.py te`, in envs/te."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain_precision import PrecisionError, TransformerEngineRecipe
from drivetrain_precision.fp8.te_layers import from_te, fuse, to_te
from drivetrain_precision.fp8.te_recipes import TE_RECIPES, te_recipe, te_unsupported

te: Any = pytest.importorskip("transformer_engine.pytorch", reason="tools/check.py te runs these")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("layers_without_a_gpu")
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="Transformer Engine computes on CUDA only"
)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def same_bits(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


# What is the same for all of them


def linear_pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    plain = nn.Linear(32, 48, **options)
    return plain, to_te(plain)


def norm_pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    plain = nn.LayerNorm(32, **options)
    return plain, to_te(plain)


def rms_pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    plain = nn.RMSNorm(32, eps=1e-6, **options)
    return plain, to_te(plain)


def fused_pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    plain = nn.Sequential(nn.LayerNorm(32, **options), nn.Linear(32, 48, **options))
    return plain, fused(plain)


def fused(plain: nn.Sequential) -> nn.Sequential:
    norm: Any = to_te(plain[0])
    linear: Any = plain[1]
    return nn.Sequential(norm, fuse(norm, linear))


PAIRS = pytest.mark.parametrize("pair", [linear_pair, norm_pair, rms_pair, fused_pair])


@PAIRS
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_converted_layer_holds_the_very_parameters(pair: Any, dtype: torch.dtype) -> None:
    plain, converted = pair(dtype=dtype)
    assert list(parameters(converted)) == list(parameters(plain))
    assert all(parameters(converted)[name] is each for name, each in parameters(plain).items())


def test_a_users_own_layer_is_not_taken_for_one_that_a_recipe_converted() -> None:
    recipe = TransformerEngineRecipe()
    assert recipe.is_converted(to_te(nn.Linear(32, 32)))
    assert not recipe.is_converted(te.Linear(32, 32, device="meta"))


@PAIRS
def test_the_state_of_a_converted_layer_is_that_of_a_plain_one(pair: Any) -> None:
    plain, converted = pair()
    assert list(converted.state_dict()) == list(plain.state_dict())
    assert all(same_bits(each, plain.state_dict()[name]) for name, each in converted.state_dict().items())


@PAIRS
def test_a_converted_layer_loads_a_plain_checkpoint_strictly_and_the_reverse(pair: Any) -> None:
    _, converted = pair()
    other, _ = pair()
    expected = copy.deepcopy(other.state_dict())
    converted.load_state_dict(expected, strict=True)
    fresh, _ = pair()
    fresh.load_state_dict(converted.state_dict(), strict=True)
    assert all(same_bits(each, expected[name]) for name, each in fresh.state_dict().items())


@PAIRS
def test_a_conversion_draws_no_random_numbers(pair: Any) -> None:
    plain = pair()[0]
    before = torch.get_rng_state()
    fused(plain) if isinstance(plain, nn.Sequential) else to_te(plain)
    assert torch.equal(torch.get_rng_state(), before)


@PAIRS
def test_a_converted_layer_is_copied(pair: Any) -> None:
    plain, converted = pair()
    again = copy.deepcopy(converted)
    assert type(again) is type(converted)
    assert all(same_bits(each, plain.state_dict()[name]) for name, each in again.state_dict().items())
    assert not set(again.parameters()) & set(converted.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_values_are_reset_to_those_of_a_plain_layer(bias: bool) -> None:
    converted = to_te(nn.Linear(32, 48, bias=bias, device="meta")).to_empty(device="cpu")
    torch.manual_seed(5)
    converted.reset_parameters()
    torch.manual_seed(5)
    expected = nn.Linear(32, 48, bias=bias).state_dict()
    assert all(same_bits(each, expected[name]) for name, each in converted.state_dict().items())
    linear, norm = nn.Linear(32, 48, bias=bias), to_te(nn.LayerNorm(32))
    both: Any = fuse(norm, linear)
    torch.manual_seed(5)
    both.reset_parameters()
    assert same_bits(linear.weight, expected["weight"])


def test_frozen_parameters_and_the_mode_stay() -> None:
    plain = nn.Linear(16, 16).eval()
    plain.weight.requires_grad_(False)
    converted = to_te(plain)
    assert not converted.training
    assert (converted.weight.requires_grad, converted.bias.requires_grad) == (False, True)
    restored = from_te(converted)
    assert not restored.training
    assert (restored.weight.requires_grad, restored.bias.requires_grad) == (False, True)


def test_layers_that_share_a_weight_share_it_afterwards() -> None:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    assert to_te(first).weight is to_te(second).weight


def test_an_optimizer_that_knew_the_plain_layer_trains_the_converted_one() -> None:
    plain = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    converted = to_te(plain)
    before = converted.weight.detach().clone()
    converted.weight.grad = torch.ones_like(converted.weight)
    optimizer.step()
    assert torch.equal(converted.weight, before - 1)


def test_a_model_on_the_meta_device_is_converted_there() -> None:
    converted = to_te(nn.Linear(16, 16, device="meta"))
    assert {each.device.type for each in converted.parameters()} == {"meta"}


# Back


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_restored_linear_layer_is_the_plain_one(bias: bool, dtype: torch.dtype) -> None:
    plain = nn.Linear(32, 48, bias=bias, dtype=dtype)
    restored = from_te(to_te(plain))
    assert type(restored) is nn.Linear
    assert repr(restored) == repr(plain)
    assert restored.weight is plain.weight
    assert restored.bias is plain.bias
    inputs = torch.randn(4, 32, dtype=dtype)
    assert same_bits(restored(inputs), plain(inputs))


@pytest.mark.parametrize("shape", [(32,), (4, 8)])
def test_a_restored_norm_is_the_plain_one(shape: tuple[int, ...]) -> None:
    plain = nn.LayerNorm(shape, eps=3e-4)
    nn.init.normal_(plain.weight)
    restored = from_te(to_te(plain))
    assert type(restored) is nn.LayerNorm
    assert repr(restored) == repr(plain)
    inputs = torch.randn(4, *shape)
    assert same_bits(restored(inputs), plain(inputs))


def test_a_linear_layer_that_was_made_by_the_library_is_restored_too() -> None:
    made = te.Linear(32, 48, device="cpu")
    restored = from_te(made)
    assert restored.weight is made.weight
    assert restored.bias is made.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [nn.LayerNorm(32, eps=1e-6), nn.RMSNorm(32, eps=1e-6)])
def test_a_norm_and_its_linear_layer_become_one_layer_and_two_again(bias: bool, norm: nn.Module) -> None:
    plain = nn.Sequential(norm, nn.Linear(32, 48, bias=bias))
    converted = fused(plain)
    layer: Any = converted[1]
    assert isinstance(layer, te.LayerNormLinear)
    assert layer.normalization == type(norm).__name__
    assert (layer.layer_norm_weight, layer.layer_norm_bias) == (norm.weight, getattr(norm, "bias", None))
    restored = nn.Sequential(*map(from_te, converted))
    assert repr(restored) == repr(plain)
    assert all(parameters(restored)[name] is each for name, each in parameters(plain).items())
    inputs = torch.randn(4, 32)
    assert same_bits(restored(inputs), plain(inputs))


def test_a_norm_that_is_computed_by_the_next_layer_hands_on_its_input() -> None:
    inputs = torch.randn(4, 32)
    assert fused(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48)))[0](inputs) is inputs


def test_a_copy_of_a_pair_computes_with_the_parameters_of_the_copy() -> None:
    converted: Any = fused(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48)))
    again = copy.deepcopy(converted)
    assert again[1].layer_norm_weight is again[0].weight
    assert again[1].layer_norm_weight is not converted[0].weight


def test_a_pair_computes_with_the_parameters_that_its_norm_has_got_since() -> None:
    converted: Any = fused(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48)).to("meta"))
    state = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48)).state_dict()
    converted.load_state_dict(state, assign=True)
    assert converted[1].layer_norm_weight is converted[0].weight
    assert same_bits(converted[1].layer_norm_weight, state["0.weight"])


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_bias": True}, r"has return_bias=True, which a plain layer does not have"),
        ({"parallel_mode": "column"}, r"parallel_mode='column'"),
        ({"parameters_split": ("query", "key")}, r"weight_names=\['query_weight', 'key_weight'\]"),
        ({"fuse_wgrad_accumulation": True}, r"fuse_wgrad_accumulation=True"),
    ],
)
def test_a_linear_layer_that_does_more_than_a_plain_one_is_not_restored(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PrecisionError, match=message):
        from_te(te.Linear(32, 32, device="cpu", **options))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: from_te(te.LayerNorm(32, device="cpu", zero_centered_gamma=True)),
            "zero_centered_gamma=True",
        ),
        (
            lambda: from_te(nn.Linear(16, 16)),
            "a Linear is none of Transformer Engine's Linear, LayerNorm, RMSN",
        ),
        (lambda: to_te(to_te(nn.Linear(16, 16))), "is a TELinear, none of"),
        (lambda: fuse(to_te(nn.LayerNorm(32)), nn.Linear(32, 32, dtype=torch.float64)), "the Linear holds "),
    ],
)
def test_what_has_no_counterpart_is_neither_converted_nor_restored(call: Any, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        call()


def test_a_forward_on_the_host_is_the_librarys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = to_te(nn.Linear(16, 16))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="CUDA"):
        converted(torch.ones(16, 16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_no_layer_with_products_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(PrecisionError, match="only where there is a CUDA device"):
        to_te(nn.Linear(16, 16))
    with pytest.raises(PrecisionError, match="only where there is a CUDA device"):
        fuse(to_te(nn.LayerNorm(16)), nn.Linear(16, 16))
    with pytest.raises(RuntimeError, match="TransformerEngine needs CUDA"):
        te.Linear(16, 16, device="meta")
    to_te(nn.LayerNorm(16))


# What is relied on of the library's own layers


def test_the_librarys_own_layers_have_the_names_that_are_taken_over() -> None:
    own = te.LayerNormLinear(32, 48, device="meta")
    assert list(parameters(own)) == ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    assert list(own.state_dict()) == [*parameters(own), "_extra_state"]
    assert list(te.LayerNorm(32, device="meta").state_dict()) == ["weight", "bias", "_extra_state"]
    assert te.Linear(32, 48, bias=False, device="meta").bias.numel() == 0  # no parameter, and not None


def test_the_librarys_own_layers_do_not_load_a_plain_checkpoint() -> None:
    with pytest.raises(RuntimeError, match=r'Missing key.* "_extra_state"'):
        te.Linear(32, 48, device="cpu").load_state_dict(nn.Linear(32, 48).state_dict())


# On a CUDA machine


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("bias", [True, False])
def test_a_converted_layer_computes_what_the_plain_one_does(bias: bool) -> None:
    plain = nn.Linear(64, 128, bias=bias, device="cuda", dtype=torch.bfloat16)
    expected, found = compared(plain, to_te(plain), plain.weight)
    assert all(relative(one, other) < 0.01 for one, other in zip(expected, found, strict=True))


@needs_cuda
@pytest.mark.cuda
def test_a_converted_norm_and_linear_layer_compute_what_the_plain_ones_do() -> None:
    norm = nn.LayerNorm(64, device="cuda", dtype=torch.bfloat16)
    linear = nn.Linear(64, 128, device="cuda", dtype=torch.bfloat16)
    plain = nn.Sequential(norm, linear)
    expected, found = compared(plain, fused(plain), linear.weight)
    assert all(relative(one, other) < 0.02 for one, other in zip(expected, found, strict=True))
    expected, found = compared(norm, to_te(norm), norm.weight)
    assert all(relative(one, other) < 0.02 for one, other in zip(expected, found, strict=True))


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("name", TE_RECIPES)
def test_each_recipe_computes_nearly_the_same_forward_and_backward(name: str) -> None:
    if (reason := te_unsupported(name)) is not None:
        pytest.skip(reason)
    plain = nn.Linear(256, 128, device="cuda", dtype=torch.bfloat16)
    converted = to_te(plain)
    inputs = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):  # delayed scaling has no scale before it has seen a tensor
        plain.weight.grad = None
        with te.autocast(recipe=te_recipe(name)):
            output = converted(inputs)
        output.float().square().mean().backward()
    gradient = plain.weight.grad
    plain.weight.grad = None
    expected = plain(inputs)
    expected.float().square().mean().backward()
    assert gradient is not None
    assert plain.weight.grad is not None
    bound = 0.3 if name == "nvfp4" else 0.1
    assert 0 < relative(expected, output) < bound
    assert 0 < relative(plain.weight.grad, gradient) < bound


def compared(
    plain: nn.Module, converted: nn.Module, weight: nn.Parameter
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Output, input's gradient and weight's gradient of both, whose parameters are the same."""
    inputs = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    found: list[tuple[Tensor, ...]] = []
    for module in (plain, converted):
        weight.grad = None
        given = inputs.clone().requires_grad_()
        output = module(given)
        # Not the mean of squares, which is the same for any input of a norm: its gradient would be rounding alone.
        torch.manual_seed(3)
        (output.float() * torch.randn(output.shape, device="cuda")).sum().backward()
        assert given.grad is not None
        assert weight.grad is not None
        found.append((output, given.grad, weight.grad))
    return found[0], found[1]


def relative(expected: Tensor, found: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
