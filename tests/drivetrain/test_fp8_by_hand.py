"""Models that were converted by hand, prepared elsewhere, or wrapped by adapters, and what a run says of them."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain_precision import LayerFilter, PrecisionError, TorchaoRecipe, convert_model
from drivetrain_precision.conversion.class_exchange import exchange_of
from drivetrain_precision.fp8.protocol import gathers_in_fp8

torchao_float8: Any = pytest.importorskip(
    "torchao.float8", reason="an extra of drivetrain-precision brings it"
)

QUIET: dict[str, Any] = {"run": {"show_plan": False}}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def make(precision: Any = "fp8", recipe: Any = None, **settings: Any) -> Accelerator:
    sections = {**QUIET, "precision": settings} if settings else QUIET
    return Accelerator(cpu=True, mixed_precision=precision, fp8_recipe=recipe, sections=sections)


def _is_1(_: nn.Module, name: str) -> bool:
    return name == "1"


@pytest.mark.default_cases("bf16")
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_plan_tells_layers_that_were_converted_by_hand_in_each_precision(precision: str) -> None:
    model, accelerator = net(), make(precision)
    convert_model(model, "torchao_rowwise")
    torchao_float8.convert_to_float8_training(model[0])
    accelerator.prepare(model)
    found = "2 of 4 linear layers, converted before prepare(): 2 in torchao_rowwise by convert_model"
    assert accelerator.plan.facts["fp8 layers"] == found
    other = net()
    torchao_float8.convert_to_float8_training(other, module_filter_fn=_is_1)
    accelerator.prepare(other)
    found = "3 of 8 linear layers, converted before prepare(): 1 in Float8Linear by torchao itself, 2 in"
    assert accelerator.plan.facts["fp8 layers"].startswith(found)


def test_the_plan_tells_nothing_of_plain_models() -> None:
    accelerator = make("bf16")
    accelerator.prepare(net())
    assert "fp8 layers" not in accelerator.plan.facts


def test_a_gather_in_fp8_that_does_not_happen_is_an_error_for_a_model_converted_by_hand_too() -> None:
    model = net()
    convert_model(model, TorchaoRecipe(all_gather=True))
    with pytest.raises(
        PrecisionError, match=r"all_gather=True\): the weight of 1 is not divided among ranks"
    ):
        make("bf16").prepare(model)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.slow
def test_a_model_of_another_accelerator_is_refused_as_prepared_already(compiled: bool) -> None:
    model = net()
    prepared = make().prepare(torch.compile(model, backend="eager") if compiled else model)
    with pytest.raises(ValueError, match="Sequential is prepared already; prepare"):
        make().prepare(prepared)
    assert exchange_of(model[1]) is not None


@pytest.mark.parametrize(("pattern", "meant"), [("1", "1.*"), ("up", "*.up")])
def test_a_pattern_of_the_settings_that_matches_nothing_is_told_in_their_name(
    pattern: str, meant: str
) -> None:
    block = nn.ModuleDict({"up": nn.Linear(64, 64), "down": nn.Linear(64, 64)})
    model = nn.ModuleDict({"0": nn.Linear(64, 64), "1": block, "2": nn.Linear(64, 64)})
    with pytest.raises(
        PrecisionError,
        match=rf"^precision\.fp8_exclude='{pattern}' matches none of the 4 .*'{re.escape(meant)}'",
    ):
        make(fp8_exclude=(pattern,)).prepare(model)
    assert not any(map(exchange_of, model.modules()))


def test_a_pattern_of_fp32_that_nothing_is_like_proposes_nothing() -> None:
    with pytest.raises(PrecisionError, match=r"'norm' matches no module .*none here is like it$"):
        make(keep_fp32=("norm",)).prepare(nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(3))))


def test_a_recipe_is_given_to_the_accelerator_by_its_name() -> None:
    accelerator = make(recipe="torchao_rowwise", fp8_exclude=("2",))
    accelerator.prepare(net())
    assert accelerator.plan.facts["fp8 layers"] == "1 of 4 linear layers in torchao_rowwise"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down, self.head = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.first(x)).relu()))


@pytest.mark.parametrize(
    ("saved", "skip_last", "expected"),
    [
        ("up", True, {"up.original_module", "up.modules_to_save.default", "down.base_layer"}),
        ("head", True, {"up", "down.base_layer"}),
        (
            "head",
            False,
            {"up", "down.base_layer", "head.original_module", "head.modules_to_save.default"},
        ),
    ],
)
@pytest.mark.slow
def test_layers_that_adapters_train_whole_are_converted_and_restored(
    saved: str, skip_last: bool, expected: set[str]
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["down"], modules_to_save=[saved])
    model = peft.get_peft_model(Net(), config)
    accelerator = make(recipe=TorchaoRecipe(layers=LayerFilter(skip_last=skip_last)))
    prepared, optimizer = accelerator.prepare(
        model, SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    )
    base = model.base_model.model
    assert {name for name, each in base.named_modules() if exchange_of(each)} == expected
    accelerator.backward(prepared(torch.randn(16, 64)).square().mean())
    optimizer.step()
    accelerator.end_training()
    assert not any(map(exchange_of, base.modules()))


def test_a_wrapper_is_not_taken_for_the_layer_that_gathers_inside_it() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Net(), peft.LoraConfig(r=4, target_modules=["down"], modules_to_save=["up"]))
    converted = convert_model(model, TorchaoRecipe(all_gather=True)).converted
    assert tuple(name for name, each in model.named_modules() if gathers_in_fp8(each)) == converted


def test_frozen_layers_run_two_products_a_step() -> None:
    model, accelerator = net(), make()
    model[1].requires_grad_(False)
    model[2].requires_grad_(False)
    prepared, optimizer = accelerator.prepare(
        model, SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    )
    accelerator.backward(prepared(torch.randn(16, 64)).square().mean())
    optimizer.step()
    assert accelerator.plan.facts["fp8 products"].startswith("4 of ")


def bf16_run(
    update: str | None, param: str | None, folder: Path | None = None
) -> tuple[Accelerator, Any, Any]:
    settings = {key: value for key, value in (("weight_update", update), ("param_dtype", param)) if value}
    accelerator, model = make("bf16", **settings), net()
    return accelerator, *accelerator.prepare(model, SGD(model.parameters(), 0.1))


@pytest.mark.parametrize(("update", "param"), [("stochastic", "bf16"), ("nearest", "bf16"), (None, None)])
def test_sums_of_kahan_that_another_rounding_drops_are_logged(
    update: str | None, param: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model, optimizer = bf16_run("kahan", "bf16")
    accelerator.backward(model(torch.randn(16, 64)).float().square().mean())
    optimizer.step()
    accelerator.save_state(tmp_path)
    other, _, loaded = bf16_run(update, param)
    with caplog.at_level(logging.INFO):
        other.load_state(tmp_path)
    assert "what was rounded off 8 parameters is dropped" in caplog.text
    assert not any("kahan_sum" in state for state in loaded.state.values())


@pytest.mark.parametrize("update", [None, "kahan", "stochastic"])
def test_two_roundings_of_the_same_updates_are_refused(update: str | None) -> None:
    optim = pytest.importorskip("torchao.optim")
    model = net()
    settings = {"param_dtype": "bf16", **({"weight_update": update} if update else {})}
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3, bf16_stochastic_round=True)
    with pytest.raises(
        PrecisionError, match=r"AdamW8bit\(bf16_stochastic_round=True\) with .*weight_update='nearest'"
    ):
        make("bf16", **settings).prepare(model, optimizer)
    left = net()
    optimizer = optim.AdamW8bit(left.parameters(), lr=1e-3, bf16_stochastic_round=True)
    make("bf16", param_dtype="bf16", weight_update="nearest").prepare(left, optimizer)
