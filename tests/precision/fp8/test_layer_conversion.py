import copy
import pickle
import re
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from drivetrain_precision import (
    LayerFilter,
    NothingConvertedError,
    PrecisionError,
    QuantizedScheme,
    TorchaoRecipe,
    TransformerEngineRecipe,
    convert_model,
    load_recipe_state,
    prepare_qat,
    recipe_state,
    restore_model,
    undo_qat,
)

EVERYWHERE = LayerFilter(skip_first=False, skip_last=False)
SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp")


def recipe(scaling: Any = "tensorwise", layers: LayerFilter = EVERYWHERE) -> TorchaoRecipe:
    return TorchaoRecipe(scaling=scaling, layers=layers)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 7))


def inputs(rows: int = 5) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_layer_stays_the_object_that_it_was_and_comes_back_as_it_was(scaling: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers, names, parameters = list(model), list(model.state_dict()), list(model.parameters())
    attributes = [set(vars(layer)) for layer in layers]
    plain = model(inputs())
    report = convert_model(model, recipe(scaling))
    assert report.converted == ("0", "2")
    assert [one is other for one, other in zip(model, layers, strict=True)] == [True] * 5
    assert list(model.state_dict()) == names
    held = [*model.parameters(), *optimizer.param_groups[0]["params"]]
    assert all(one is other for one, other in zip(held, parameters * 2, strict=True))
    assert isinstance(model[0], nn.Linear)
    converted = model(inputs())
    assert not torch.equal(converted, plain)
    torch.testing.assert_close(converted, plain, rtol=0.1, atol=0.1)
    assert restore_model(model, recipe(scaling)) == ("0", "2")
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear, nn.LayerNorm, nn.Linear]
    assert [set(vars(layer)) for layer in layers] == attributes
    assert torch.equal(model(inputs()), plain)


def test_hooks_run_as_before() -> None:
    model, seen = net(), list[str]()
    model[2].register_forward_hook(lambda *_: seen.append("forward"))
    model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[2].weight.register_hook(lambda _: seen.append("gradient"))
    convert_model(model, recipe())
    model(inputs()).sum().backward()
    assert sorted(seen) == ["backward", "forward", "gradient"]


def test_a_shared_layer_is_converted_once_under_its_first_name() -> None:
    layer = nn.Linear(32, 32)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert convert_model(model, recipe()).converted == ("0",)
    assert model[0] is model[2]
    assert restore_model(model, recipe()) == ("0",)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_frozen_layer_hands_gradients_on_and_gets_none(scaling: str) -> None:
    model = net()
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    assert "2" in convert_model(model, recipe(scaling)).converted
    model(inputs()).square().sum().backward()
    assert model[2].weight.grad is None
    gradient = model[0].weight.grad.clone()
    restore_model(model, recipe(scaling))
    model.zero_grad()
    model(inputs()).square().sum().backward()
    error = (gradient - model[0].weight.grad).norm() / model[0].weight.grad.norm()
    assert 0 < error < 0.2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_copy_of_a_converted_model_computes_the_same_and_is_restored_alone(
    copied: Any, scaling: str
) -> None:
    model = net()
    convert_model(model, recipe(scaling))
    twin = copied(model)
    assert torch.equal(twin(inputs()), model(inputs()))
    restore_model(twin, recipe(scaling))
    assert type(twin[0]) is nn.Linear
    assert recipe().is_converted(model[0])
    twin[0].weight.data.zero_()
    assert model[0].weight.any()


def test_the_state_of_a_converted_model_is_that_of_a_plain_one_and_loads_into_another_recipe() -> None:
    model, other, plain = net(), net(), net()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    convert_model(model, recipe("rowwise"))
    convert_model(other, recipe("mxfp8"))
    for target in (other, plain):
        target.load_state_dict(model.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(target.parameters(), model.parameters(), strict=True))
    assert recipe_state(model, recipe("rowwise")) == {}
    assert load_recipe_state(model, recipe("rowwise"), {"0.amax": torch.ones(1)}) == ()


def test_a_converted_model_is_not_converted_again() -> None:
    model = net()
    convert_model(model, recipe())
    with pytest.raises(PrecisionError, match=r"0 is converted already; restore_model\(model, recipe\) first"):
        convert_model(model, recipe("rowwise"))


def test_a_layer_that_rounds_for_quantised_inference_is_no_converted_one_and_is_refused_by_name() -> None:
    model = net()
    prepare_qat(model, QuantizedScheme())
    for used in (recipe(), recipe("mxfp8"), TransformerEngineRecipe()):
        assert not used.is_converted(model[0])
    with pytest.raises(
        PrecisionError,
        match=r"0 rounds its weight for quantised inference \(prepare_qat\).* undo_qat\(model\)",
    ):
        convert_model(model, recipe())
    assert restore_model(model, recipe()) == ()
    assert undo_qat(model) == ("0", "2")
    convert_model(model, recipe())
    assert undo_qat(model) == ()
    assert recipe().is_converted(model[0])


def test_a_layer_that_only_looks_like_one_of_transformer_engine_is_no_converted_one() -> None:
    own = nn.Linear(32, 32)
    own.fp8_meta = {}
    assert not TransformerEngineRecipe().is_converted(own)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_layer_with_a_name_of_its_own_that_the_converted_one_uses_stays_as_it_is(scaling: str) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    name = "wgrad_with_hp" if scaling.startswith("mxfp8") else "config"
    setattr(model[0], name, {"layer": 0})
    model[1].register_buffer("row_multiple", torch.ones(1))
    model[2].note = "of a user's, and in nobody's way"
    report = convert_model(model, recipe(scaling))
    assert report.converted == ("2", "3")
    assert [each.reason.partition(" of its own, a name that")[0] for each in report.layers[:2]] == [
        f"has {name!r}",
        "has 'row_multiple'",
    ]
    model(inputs())
    assert getattr(model[0], name) == {"layer": 0}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_layer_in_fp64_is_refused(scaling: str) -> None:
    with pytest.raises(
        NothingConvertedError, match=r"0 holds its weight in torch\.float64, in which torchao"
    ):
        convert_model(net().double(), recipe(scaling))


def test_where_nothing_is_converted_the_error_names_the_layers_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(7, 32), nn.Linear(32, 9))
    with pytest.raises(NothingConvertedError) as raised:
        convert_model(model, recipe("mxfp8"))
    assert str(raised.value) == (
        "recipe torchao_mxfp8: no layer of Sequential can be converted: 0 has in_features=7, which is not divisible "
        "by 32; 1 has out_features=9, which is not divisible by 32. No LayerFilter changes that: train in "
        "bf16"
    )
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    with pytest.raises(NothingConvertedError, match=r"it has no nn\.Linear"):
        convert_model(nn.Conv1d(1, 1, 1), recipe())


def test_a_model_that_is_a_single_layer_is_converted_itself() -> None:
    model = nn.Linear(32, 32)
    assert convert_model(model, recipe()).converted == ("",)
    assert recipe().is_converted(model)
    assert restore_model(model, recipe()) == ("",)


def test_the_report_counts_the_others_by_reason() -> None:
    report = convert_model(net(), recipe())
    assert str(report).splitlines() == [
        "2 of 4 layers compute in torchao_tensorwise; the others:",
        "      1  is of class LayerNorm, not nn.Linear",
        "      1  has out_features=7, which is not divisible by 16",
    ]


def test_a_weight_of_the_old_weight_norm_is_computed_and_its_parts_are_trained() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32))
    convert_model(model, recipe())
    model(inputs()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def own_forward() -> nn.Linear:
    layer = nn.Linear(32, 32)
    layer.forward = lambda input: input  # as libraries patch layers
    return layer


def int8_weights() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = nn.Sequential(nn.Linear(32, 32))
    quantize_(layer, Int8WeightOnlyConfig())
    return layer[0]


def four_bits() -> nn.Module:
    from bitsandbytes.nn import Linear4bit

    return cast("nn.Module", Linear4bit(32, 32))


REFUSED = {
    "a subclass": (lambda: Scaled(32, 32), r"is of class .*\.Scaled, which has a forward of its own"),
    "a parametrized layer": (
        lambda: parametrizations.orthogonal(nn.Linear(32, 32)),
        r"ParametrizedLinear, which has a forward of its own",
    ),
    "a patched forward": (own_forward, "has a forward of its own, set on the object"),
    "torchao's int8 weights": (int8_weights, r"holds a \w+ as its weight: quantised, or divided"),
    "bitsandbytes": (four_bits, r"bitsandbytes\.nn\.modules\.Linear4bit, which has a forward of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_recipe_would_break_stays_as_it_is(case: str) -> None:
    make, reason = REFUSED[case]
    layer = make()
    model = nn.Sequential(nn.Linear(32, 32), layer)
    kind = type(layer)
    report = convert_model(model, recipe())
    assert report.converted == ("0",)
    assert type(layer) is kind
    decision = next((each for each in report.layers if each.name == "1"), None)
    assert decision is not None
    assert re.search(reason, decision.reason)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.words(ids)))


def test_a_tied_weight_is_refused_with_the_name_of_the_other() -> None:
    report = convert_model(Tied(), recipe())
    assert report.converted == ("inner",)
    reasons = {each.name: each.reason for each in report.layers}
    assert reasons["head"] == "shares its weight with words.weight, which is used in full precision"


def test_low_rank_adapters_stay_and_their_base_is_converted() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(net(), LoraConfig(r=16, target_modules=["0", "2"], init_lora_weights=False))
    names = list(model.state_dict())
    plain = model(inputs())
    report = convert_model(model, recipe())
    assert report.converted == ("base_model.model.0.base_layer", "base_model.model.2.base_layer")
    adapters = [each.reason for each in report.layers if "lora_" in each.name]
    assert adapters == ["is a low-rank adapter"] * 4
    assert list(model.state_dict()) == names
    model(inputs()).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)
    restore_model(model, recipe())
    assert torch.equal(model(inputs()), plain)


def test_adapters_are_neither_the_first_nor_the_last_layer() -> None:
    from peft import LoraConfig, get_peft_model

    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    model = get_peft_model(layers, LoraConfig(r=16, target_modules=["0", "1", "2"]))
    report = convert_model(model, TorchaoRecipe())
    assert report.converted == ("base_model.model.1.base_layer",)
    reasons = {each.name: each.reason for each in report.layers}
    assert reasons["base_model.model.2.base_layer"] == "is the last linear layer (skip_last)"
    assert reasons["base_model.model.2.lora_B.default"] == "is a low-rank adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing(TorchaoRecipe):
    """A recipe that fails at one layer."""

    at: nn.Module
    error: BaseException = field(default_factory=lambda: RuntimeError("no memory left"))

    def convert(self, module: nn.Module) -> nn.Module:
        if module is self.at:
            raise self.error
        return super(Failing, self).convert(module)


@pytest.mark.parametrize("error", [RuntimeError("no memory left"), KeyboardInterrupt("no memory left")])
def test_a_conversion_that_fails_half_way_leaves_the_model_as_it_was(error: BaseException) -> None:
    model = net()
    attributes = [set(vars(layer)) for layer in model]
    with pytest.raises(type(error), match="no memory left"):
        convert_model(model, Failing(layers=EVERYWHERE, at=model[2], error=error))
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear, nn.LayerNorm, nn.Linear]
    assert [set(vars(layer)) for layer in model] == attributes
    assert convert_model(model, recipe()).converted == ("0", "2")


class Doubled(nn.Linear):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacing(Failing):
    """A recipe that exchanges a layer for another module, as Transformer Engine's do."""

    def convert(self, module: nn.Module) -> nn.Module:
        if module is self.at:
            raise self.error
        linear = cast("nn.Linear", module)
        made = Doubled(linear.in_features, linear.out_features)
        made.load_state_dict(linear.state_dict())
        return made

    def is_converted(self, module: nn.Module) -> bool:
        return type(module) is Doubled


def test_layers_that_were_exchanged_are_put_back_into_all_places_when_a_later_one_fails() -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ModuleDict({"inner": shared}), nn.Linear(32, 32))
    with pytest.raises(RuntimeError, match="no memory left"):
        convert_model(model, Replacing(layers=EVERYWHERE, at=model[2]))
    assert model[0] is model[1]["inner"] is shared
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    convert_model(twice, Replacing(layers=EVERYWHERE, at=model))
    assert type(twice[0]) is Doubled
    assert twice[0] is twice[2]


def test_a_compiled_model_is_converted_under_the_names_of_the_plain_one() -> None:
    model = net()
    compiled = cast("nn.Module", torch.compile(model, backend="eager"))
    report = convert_model(compiled, recipe(layers=LayerFilter(include=("2",), skip_last=False)))
    assert report.converted == ("2",)
    assert recipe().is_converted(model[2])
    assert restore_model(compiled, recipe()) == ("2",)
    assert type(model[2]) is nn.Linear


def test_a_layer_that_another_model_shares_stays_converted_and_says_so() -> None:
    shared = nn.Linear(32, 32)
    first, second = nn.Sequential(shared, nn.Linear(32, 32)), nn.Sequential(shared, nn.Linear(32, 16))
    convert_model(first, recipe())
    kept = {shared: "is shared with a model converted before"}
    report = convert_model(second, recipe(), kept=kept)
    assert report.converted == ("1",)
    assert report.layers[0].reason == "is shared with a model converted before"
    assert restore_model(second, recipe(), kept=kept) == ("1",)
    assert recipe().is_converted(shared)
    alone = nn.Sequential(shared)
    assert convert_model(alone, recipe(), kept=kept).converted == ()


def divided() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(net(), init_device_mesh("cpu", (2,)), {"2": ColwiseParallel()})
    report = convert_model(model, recipe())
    assert report.converted == ("0",)
    return next(each.reason for each in report.layers if each.name == "2")


def test_a_layer_that_is_divided_among_ranks_is_refused(run_ranks) -> None:
    reason = "holds a DTensor as its weight: quantised, or divided among ranks already"
    assert run_ranks(divided) == [reason] * 2
