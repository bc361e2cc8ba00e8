"""Run by `tools/check.py te`, in envs/te: whole models, whose norms are kept, converted, or fused."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain_precision import (
    LayerFilter,
    NothingConvertedError,
    PrecisionError,
    TransformerEngineRecipe,
    convert_model,
    recipe_state,
    restore_model,
)
from drivetrain_precision.conversion.converts_norms import Norms
from drivetrain_precision.conversion.layer_report import LayerReport
from drivetrain_precision.support import Support

te: Any = pytest.importorskip("transformer_engine.pytorch", reason="tools/check.py te runs these")

pytestmark = pytest.mark.usefixtures("layers_without_a_gpu")
ALL = LayerFilter(skip_first=False, skip_last=False)
EACH = pytest.mark.parametrize("norms", ["keep", "convert", "fuse"])


class Anywhere(TransformerEngineRecipe):
    """The recipe, also where nothing can be computed: layers are converted and restored on any device."""

    def support(self, device: torch.device) -> Support:
        return Support(level="native", reason="nothing is computed")


class Block(nn.Module):
    """A norm with two readers, and a pair of which no other module reads the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.mlp(self.query(x) + self.key(x))


def net(*, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), Block(), nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 16)).to(device)
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            nn.init.normal_(module.weight)
    return model


def recipe(norms: Norms, **options: Any) -> TransformerEngineRecipe:
    options.setdefault("layers", ALL)
    return Anywhere(norms=norms, **options)


def pairs(report: LayerReport) -> dict[str, str]:
    return {each.name: each.fused_with for each in report.layers if each.fused_with}


def told(model: nn.Module, norms: Norms = "fuse", **options: Any) -> dict[str, str]:
    """What is said of each norm."""
    report = convert_model(model, recipe(norms, **options))
    return {
        each.name: each.reason or each.unfused or f"with {each.fused_with}"
        for each in report.layers
        if "Norm" in each.kind
    }


# The whole way


@EACH
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_and_parameters_stay_and_a_restored_model_is_the_plain_one(norms: Norms, device: str) -> None:
    model = net(device=device)
    described, held = repr(model), dict(model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    report = convert_model(model, recipe(norms))
    assert list(model.state_dict()) == list(before)
    assert list(dict(model.named_parameters())) == list(held)
    assert all(each is held[name] for name, each in model.named_parameters())
    assert sum(isinstance(each, te.LayerNormLinear) for each in model.modules()) == (
        2 if norms == "fuse" else 0
    )
    assert restore_model(model, recipe(norms)) == report.converted
    assert repr(model) == described
    assert all(each is held[name] for name, each in model.named_parameters())
    assert list(model.state_dict()) == list(before)
    if device == "cpu":
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
        inputs = torch.randn(4, 16)
        assert torch.equal(model(inputs), net()(inputs))


@EACH
def test_an_optimizer_that_was_made_before_trains_what_is_converted(norms: Norms) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    convert_model(model, recipe(norms))
    before = copy.deepcopy(model.state_dict())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    assert all(torch.equal(each, before[name] - 1) for name, each in model.state_dict().items())
    if norms == "fuse":
        fused: Any = model.get_submodule("1.mlp.1")
        assert torch.equal(fused.layer_norm_weight, before["1.mlp.0.weight"] - 1)


@EACH
def test_checkpoints_are_exchanged_with_plain_models(norms: Norms) -> None:
    model, plain = net(), net()
    convert_model(model, recipe(norms))
    plain.load_state_dict(model.state_dict(), strict=True)
    assert all(torch.equal(each, plain.state_dict()[name]) for name, each in model.state_dict().items())
    with torch.no_grad():
        for each in plain.parameters():
            each.add_(1)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert all(torch.equal(each, plain.state_dict()[name]) for name, each in model.state_dict().items())


def test_a_copy_of_a_fused_model_is_restored_without_the_original() -> None:
    model = net()
    convert_model(model, recipe("fuse"))
    again = copy.deepcopy(model)
    fused: Any = again.get_submodule("1.mlp.1")
    assert fused.layer_norm_weight is again.get_parameter("1.mlp.0.weight")
    restore_model(again, recipe("fuse"))
    inputs = torch.randn(4, 16)
    assert torch.equal(again(inputs), net()(inputs))
    assert isinstance(model.get_submodule("1.mlp.1"), te.LayerNormLinear)


def test_a_model_whose_norms_are_converted_is_not_converted_again() -> None:
    model = net()
    convert_model(model, recipe("fuse"))
    with pytest.raises(PrecisionError, match="is converted already"):
        convert_model(model, recipe("fuse"))


def test_norms_keep_no_state_of_delayed_scaling() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    used = recipe("convert", scaling="delayed", layers=LayerFilter(exclude=("0",)))
    with pytest.raises(NothingConvertedError):
        convert_model(model, used)
    model[1] = used.convert(model[1])
    assert recipe_state(model, used) == {}


# The report


def test_each_norm_is_reported() -> None:
    assert told(net()) == {
        "1.norm": "no linear layer that is converted follows it in an nn.Sequential",
        "1.mlp.0": "with 1.mlp.1",
        "2": "with 3",
    }
    assert set(told(net(), "convert").values()) == {"with "}
    assert told(net(), "keep") == {
        "1.norm": "is a LayerNorm, and norms='keep'",
        "1.mlp.0": "is a LayerNorm, and norms='keep'",
        "2": "is a RMSNorm, and norms='keep'",
    }


def test_norms_are_kept_unless_said() -> None:
    assert TransformerEngineRecipe().norms == "keep"


def test_a_linear_layer_is_reported_with_its_norm() -> None:
    report = convert_model(net(), recipe("fuse"))
    assert pairs(report) == {"1.mlp.0": "1.mlp.1", "1.mlp.1": "1.mlp.0", "2": "3", "3": "2"}
    assert len(report.converted) == 9
    assert len(report.converted_linear) == 6
    assert str(report).splitlines()[1:] == [
        "      1  norm among them, computed by itself: no linear layer that is converted follows it in an "
        "nn.Sequential",
        "      2  norm among them, computed with the linear layer after it",
    ]


def test_patterns_hold_for_norms_that_are_converted() -> None:
    found = told(net(), layers=LayerFilter(exclude=("*.norm",), skip_first=False))
    assert found == {
        "1.norm": "exclude='*.norm' matches",
        "1.mlp.0": "with 1.mlp.1",
        "2": "no linear layer that is converted follows it in an nn.Sequential",
    }
    with pytest.raises(PrecisionError, match=r"exclude='\*\.norm'\) matches none of the 6 linear layers"):
        convert_model(net(), recipe("keep", layers=LayerFilter(exclude=("*.norm",))))


def test_a_least_size_is_one_of_products() -> None:
    assert told(net(), layers=LayerFilter(min_features=17))["1.mlp.0"] == "with 1.mlp.1"


def test_a_norm_that_is_kept_is_not_fused() -> None:
    model = net()
    report = convert_model(model, recipe("fuse"), kept={model.get_submodule("2"): "stays in fp32"})
    assert {each.name: each.reason for each in report.layers}["2"] == "stays in fp32"
    assert type(model.get_submodule("3")).__name__ == "TELinear"


def test_a_norm_the_library_does_not_have_is_told() -> None:
    model = nn.Sequential(
        nn.RMSNorm(32), nn.Linear(32, 32), nn.LayerNorm(32, bias=False), nn.GroupNorm(2, 32)
    )
    report = convert_model(model, recipe("fuse"))
    assert report.converted == ("1",)
    reasons = [each.reason for each in report.layers if each.name != "1"]
    assert reasons[0].startswith("has eps=None")
    assert reasons[1].startswith("has no bias")
    assert reasons[2] == "is of class GroupNorm, not nn.Linear"


class Backwards(nn.Sequential):
    def forward(self, input: Any) -> Any:
        for module in reversed(self):
            input = module(input)
        return input


def in_two_places() -> nn.Module:
    norm = nn.LayerNorm(32)
    return nn.Sequential(norm, nn.Linear(32, 32), norm, nn.Linear(32, 32))


def before_a_module_in_two_places() -> nn.Module:
    shared = nn.GELU()
    return nn.Sequential(shared, nn.LayerNorm(32), shared, nn.Linear(32, 32))


def with_a_forward_of_its_own() -> nn.Module:
    inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    inner.forward = lambda input: inner[1](inner[0](input)) + inner[0](input)
    return nn.Sequential(inner)


def in_other_modes() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32).eval(), nn.Linear(32, 32))


FOLLOWS = "no linear layer that is converted follows"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32)), FOLLOWS),
        (nn.ModuleList([nn.LayerNorm(32), nn.Linear(32, 32)]), FOLLOWS),
        (nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)), FOLLOWS),
        (Backwards(nn.LayerNorm(32), nn.Linear(32, 32)), FOLLOWS),
        (with_a_forward_of_its_own(), FOLLOWS),
        (before_a_module_in_two_places(), FOLLOWS),
        (in_two_places(), "it or 1 is in several places"),
        (in_other_modes(), "alone is in training mode"),
        (
            nn.Sequential(nn.LayerNorm(32, dtype=torch.bfloat16), nn.Linear(32, 32)),
            "holds torch.bfloat16 on cpu, and the linear layer torch.float32",
        ),
        (
            nn.Sequential(nn.LayerNorm((4, 32)), nn.Linear(32, 32)),
            r"normalises \(4, 32\), and the linear layer",
        ),
    ],
)
def test_a_norm_is_computed_by_itself_where_a_pair_is_not_certain(model: nn.Module, why: str) -> None:
    report = convert_model(model, recipe("fuse"))
    assert pairs(report) == {}
    (decision,) = (each for each in report.layers if each.kind == "LayerNorm")
    assert decision.converts
    assert re.search(why, decision.unfused)
    assert not any(isinstance(each, te.LayerNormLinear) for each in model.modules())


def test_a_pair_between_which_a_hook_reads_is_not_fused() -> None:
    model = net()
    model.get_submodule("1.mlp.0").register_forward_hook(lambda module, inputs, output: None)
    assert told(model)["1.mlp.0"].startswith("has hooks (_forward_hooks")
    model = net()
    model.get_submodule("1.mlp.1").register_forward_pre_hook(lambda module, inputs: None)
    assert told(model)["1.mlp.0"].startswith(FOLLOWS)


# Refused


def test_what_becomes_of_norms_is_one_of_three() -> None:
    with pytest.raises(PrecisionError, match="norms='drop': must be one of keep, convert, fuse"):
        TransformerEngineRecipe(norms="drop")  # pyright: ignore[reportArgumentType]


def test_a_model_of_norms_alone_has_nothing_that_computes_in_fp8() -> None:
    model = nn.Sequential(nn.LayerNorm(32))
    with pytest.raises(NothingConvertedError, match=r"it has no nn\.Linear"):
        convert_model(model, recipe("convert"))
    assert type(model[0]) is nn.LayerNorm


class Failing(Anywhere):
    """A recipe that fails after the pair is one layer."""

    def convert(self, module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear) and module.out_features == 64:
            raise RuntimeError("out of memory")
        return super().convert(module)


def test_a_conversion_that_fails_leaves_a_model_as_it_was() -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 64))
    before = list(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        convert_model(model, Failing(norms="fuse", layers=ALL))
    assert all(now is then for now, then in zip(model, before, strict=True))
