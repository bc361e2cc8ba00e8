from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from drivetrain import Accelerator
from drivetrain_precision import (
    LayerFilter,
    NothingConvertedError,
    PrecisionError,
    TorchaoRecipe,
    TransformerEngineRecipe,
    convert_model,
)
from drivetrain_precision.dtypes.fp32_islands import Fp32Island
from drivetrain_precision.fp8.protocol import Requirements
from optional_modules import skip_without

skip_without("torchao")  # an extra of drivetrain-precision brings it

QUIET: dict[str, Any] = {"run": {"show_plan": False}}


def net(width: int = 32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4)]
    return nn.Sequential(*layers)


def make(recipe: Any = None, **kwargs: Any) -> Accelerator:
    sections = {**QUIET, **kwargs.pop("sections", {})}
    options: dict[str, Any] = {"cpu": True, "mixed_precision": "fp8", **kwargs}
    return Accelerator(fp8_recipe=recipe, sections=sections, **options)


def batch(step: int = 0, rows: int = 5) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(step))


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: Sequence[int]) -> list[float]:
    losses: list[float] = []
    for step in steps:
        with accelerator.accumulate(model):
            loss = (model(batch(step)).float() - 1).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(accelerator: Accelerator) -> tuple[nn.Module, Any]:
    model = net()
    return accelerator.prepare(model, AdamW(model.parameters(), lr=0.01))


def test_the_plan_tells_the_layers_at_once_and_the_products_after_the_first_step() -> None:
    recipe = TorchaoRecipe(scaling="rowwise")
    with make(recipe) as accelerator:
        assert accelerator.fp8_recipe == recipe
        model, optimizer = prepared(accelerator)
        assert accelerator.plan.facts["fp8 layers"] == "1 of 3 linear layers in torchao_rowwise"
        assert accelerator.plan.facts["precision"] == "fp8"
        assert "fp8 products" not in accelerator.plan.facts
        train(accelerator, model, optimizer, range(2))
        told = accelerator.plan.facts["fp8 products"]
        assert told.startswith(
            "3 of 8 matrix products of the first step ran in torchao_rowwise; a CPU computes"
        )


def test_after_the_first_step_nothing_is_observed() -> None:
    with make() as accelerator:
        before = accelerator.context.progress.observers
        model, optimizer = prepared(accelerator)
        assert len(accelerator.context.progress.observers) == len(before) + 1
        train(accelerator, model, optimizer, range(1))
        assert accelerator.context.progress.observers == before
        other = net(64)
        accelerator.prepare(other, SGD(other.parameters(), lr=0.1))
        assert accelerator.context.progress.observers == before


@pytest.mark.slow
def test_an_accelerator_that_ends_before_its_first_step_observes_nothing() -> None:
    with make() as accelerator:
        prepared(accelerator)
    assert accelerator.context.progress.observers == ()


def test_models_are_plain_again_once_they_are_released_and_can_be_prepared_again() -> None:
    with make() as accelerator:
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, range(2))
        plain = accelerator.unwrap_model(model)
        accelerator.free_memory()
        assert type(plain[2]) is nn.Linear
        model, optimizer = accelerator.prepare(plain, AdamW(plain.parameters(), lr=0.01))
        assert accelerator.plan.facts["fp8 layers"].startswith("1 of 3")
        train(accelerator, model, optimizer, range(2))
    assert type(plain[2]) is nn.Linear


def test_micro_batches_of_the_first_window_are_counted_together() -> None:
    with make(gradient_accumulation_steps=2) as accelerator:
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, range(2))
        assert accelerator.plan.facts["fp8 products"].startswith("6 of 16")


def test_bf16_instead_is_told_in_the_plan_with_its_reason() -> None:
    sections = {"precision": {"fp8_recipe": "torchao_nvfp4", "fp8_fallback": "bf16"}}
    with make(sections=sections) as accelerator:
        model, _ = prepared(accelerator)
        assert type(accelerator.unwrap_model(model)[2]) is nn.Linear
        row = next(row for row in accelerator.plan.rows if row.setting == "run.mixed_precision")
        assert (row.asked, row.applied) == ("fp8", "bf16")
        assert accelerator.fp8_recipe is None
        assert row.reason.startswith("fp8_fallback: recipe 'torchao_nvfp4': it needs a Blackwell")


def test_without_a_fallback_composing_is_an_error() -> None:
    with pytest.raises(PrecisionError, match="the nearest that runs here is 'torchao_mxfp8'"):
        make(sections={"precision": {"fp8_recipe": "torchao_nvfp4"}})


class Untried(TorchaoRecipe):
    """A recipe of a library that was not run under all backends, as Transformer Engine's are."""

    @property
    def requirements(self) -> Requirements:
        tried = TransformerEngineRecipe().requirements
        found = super().requirements
        return replace(found, backends=tried.backends, untried_backends=tried.untried_backends)


@pytest.mark.parametrize(
    "backend", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.slow)]
)  # it takes long to import
def test_a_backend_that_a_recipe_does_not_name_is_refused_when_the_run_is_composed(backend: str) -> None:
    if backend == "deepspeed":
        skip_without("deepspeed")
    with pytest.raises(
        PrecisionError, match=r"layers have not been run under \w+Backend, only backend='single' or 'ddp'"
    ):
        make(Untried(), backend=backend)


def test_a_backend_that_a_recipe_was_not_run_under_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with make(Untried(), backend="ddp") as accelerator:
        prepared(accelerator)
    warnings = [each for each in caplog.messages if "on several GPUs" in each]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "fp8_recipe='torchao_tensorwise' under DDPBackend: the project's tests have not"
    )
    caplog.clear()
    for recipe, backend in ((Untried(), "single"), (TorchaoRecipe(), "ddp")):
        with make(recipe, backend=backend):
            pass
    assert "on several GPUs" not in caplog.text


def test_settings_choose_the_recipe_and_the_layers() -> None:
    sections = {"precision": {"fp8_recipe": "torchao_rowwise", "fp8_skip_ends": False, "fp8_exclude": ["2"]}}
    with make(sections=sections) as accelerator:
        model = accelerator.unwrap_model(prepared(accelerator)[0])
        assert accelerator.plan.facts["fp8 layers"] == "1 of 3 linear layers in torchao_rowwise"
        assert [type(layer) is nn.Linear for layer in model][::2] == [False, True, True]


def test_modules_that_stay_in_fp32_are_not_converted() -> None:
    every_layer = TorchaoRecipe(layers=LayerFilter(skip_first=False, skip_last=False))
    with make(every_layer, sections={"precision": {"keep_fp32": ("2",)}}) as accelerator:
        model, optimizer = prepared(accelerator)
        assert accelerator.plan.facts["fp8 layers"] == "1 of 3 linear layers in torchao_tensorwise"
        train(accelerator, model, optimizer, range(1))
        dtypes: list[torch.dtype] = []
        inner = accelerator.unwrap_model(model)
        inner[2].register_forward_hook(lambda *given: dtypes.append(given[0].weight.dtype))
        assert type(inner[2]).__mro__[1:3] == (Fp32Island, nn.Linear)
        model(batch())
    assert dtypes == [torch.float32]


@pytest.mark.slow
def test_keeping_all_linear_layers_in_fp32_leaves_nothing_to_convert() -> None:
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    with make(sections={"precision": {"keep_fp32": ("Linear",)}}) as accelerator:
        with pytest.raises(NothingConvertedError, match=r"stays in fp32 \(keep_fp32\)"):
            accelerator.prepare(model)


def test_a_model_without_an_optimizer_computes_in_fp8_too() -> None:
    with make() as accelerator:
        model = accelerator.prepare(net())
        assert accelerator.plan.facts["fp8 layers"].startswith("1 of 3")
        with torch.no_grad():
            assert model(batch()).dtype == torch.bfloat16


@pytest.mark.slow
def test_of_several_models_one_may_stay_in_bf16_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for together in (True, False):
        caplog.clear()
        with make() as accelerator:
            actor, critic = net(), nn.Sequential(nn.Linear(16, 7), nn.Linear(7, 1))
            optimizers = [SGD(model.parameters(), lr=0.1) for model in (actor, critic)]
            if together:
                accelerator.prepare(critic, actor, *optimizers)
            else:
                accelerator.prepare(actor, optimizers[0])
                accelerator.prepare(critic, optimizers[1])
            assert type(critic[1]) is nn.Linear
            assert accelerator.plan.facts["fp8 layers"].startswith("1 of 3")
            assert "a model stays in bf16: recipe torchao_tensorwise: no layer of Sequential" in caplog.text


@pytest.mark.slow
def test_models_prepared_in_several_calls_are_counted_together() -> None:
    with make() as accelerator:
        for seed in (0, 1):
            model = net(seed=seed)
            accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        assert accelerator.plan.facts["fp8 layers"] == "2 of 6 linear layers in torchao_tensorwise"


def test_where_nothing_is_converted_prepare_is_an_error_and_the_model_stays_as_it_was() -> None:
    with make() as accelerator:
        model = net(20)
        with pytest.raises(NothingConvertedError, match="2 has in_features=20, which is not divisible by 16"):
            accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        assert type(model[2]) is nn.Linear
        accelerator.prepare(net())


def test_a_preparation_that_fails_gives_the_plain_models_back() -> None:
    with make() as accelerator:
        models = [net(), net()]
        stranger = SGD(net().parameters(), lr=0.1)
        with pytest.raises(ValueError, match="optimizer"):
            accelerator.prepare(*models, stranger)
        assert all(type(model[2]) is nn.Linear for model in models)
        accelerator.prepare(models[0])
        assert accelerator.plan.facts["fp8 layers"].startswith("1 of 3")


@pytest.mark.slow
def test_a_pattern_may_match_in_one_of_several_models() -> None:
    sections = {"precision": {"fp8_exclude": ("2",)}}
    with make(sections=sections) as accelerator:
        other = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("first", "up", "last")})
        accelerator.prepare(net(), other)
        assert accelerator.plan.facts["fp8 layers"].startswith("1 of 3")
        accelerator.prepare(nn.ModuleDict({name: nn.Linear(16, 16) for name in other}))
        assert accelerator.plan.facts["fp8 layers"].startswith("2 of 6")
    with make(sections=sections) as accelerator, pytest.raises(PrecisionError, match="exclude='2'"):
        accelerator.prepare(other)


def sharing() -> tuple[nn.Linear, nn.Sequential, nn.Sequential]:
    shared = nn.Linear(16, 16)
    first = nn.Sequential(nn.Linear(16, 16), shared, nn.Linear(16, 16), nn.Linear(16, 4))
    return shared, first, nn.Sequential(nn.Linear(16, 16), shared, nn.Linear(16, 32), nn.Linear(32, 4))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.default_cases("True")
def test_a_layer_that_two_models_share_is_converted_once_and_given_back_once(together: bool) -> None:
    recipe = TorchaoRecipe()
    with make(recipe) as accelerator:
        shared, first, second = sharing()
        if together:
            accelerator.prepare(first, second)
        else:
            accelerator.prepare(first)
            accelerator.prepare(second)
        assert [recipe.is_converted(each) for each in (shared, first[2], second[2])] == [True] * 3
        assert second(torch.ones(2, 16)).isfinite().all()
        accelerator.free_memory()
        assert {type(each) for each in (*first, *second)} == {nn.Linear}
        accelerator.prepare(second)
        assert recipe.is_converted(shared)


def test_a_preparation_that_fails_leaves_the_layers_of_models_prepared_before_converted() -> None:
    recipe = TorchaoRecipe()
    with make(recipe) as accelerator:
        shared, first, second = sharing()
        prepared = accelerator.prepare(first)
        with pytest.raises(ValueError, match="optimizer"):
            accelerator.prepare(second, SGD(net().parameters(), lr=0.1))
        assert recipe.is_converted(shared)
        assert type(second[2]) is nn.Linear
        with pytest.raises(ValueError, match="prepared"):
            accelerator.prepare(prepared)
        assert recipe.is_converted(first[2])


def test_a_model_that_was_converted_by_hand_is_refused_and_stays_converted() -> None:
    recipe = TorchaoRecipe()
    with make() as accelerator:
        model, other = net(), net()
        convert_model(model, recipe)
        with pytest.raises(PrecisionError, match="2 is converted already"):
            accelerator.prepare(other, model)
        assert recipe.is_converted(model[2])
        assert type(other[2]) is nn.Linear


@pytest.mark.slow
def test_a_model_that_was_converted_by_hand_trains_under_bf16() -> None:
    with make(mixed_precision="bf16") as accelerator:
        model = net()
        convert_model(model, TorchaoRecipe())
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        losses = train(accelerator, model, optimizer, range(3))
    with make() as accelerator:
        model = net()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        assert train(accelerator, model, optimizer, range(3)) == losses


def test_unwrapped_models_and_autocast_are_as_in_bf16() -> None:
    with make() as accelerator:
        plain = net()
        model = accelerator.prepare(plain)
        assert accelerator.unwrap_model(model) is plain
        with accelerator.autocast():
            assert nn.functional.linear(torch.ones(2, 16), torch.ones(4, 16)).dtype == torch.bfloat16
        with accelerator.autocast(enabled=False):
            assert nn.functional.linear(torch.ones(2, 16), torch.ones(4, 16)).dtype == torch.float32


def test_the_losses_of_two_runs_are_the_same_bit_for_bit_and_near_those_of_bf16() -> None:
    losses: list[list[float]] = []
    for mode in ("fp8", "fp8", "bf16"):
        with make(mixed_precision=mode) as accelerator:
            model, optimizer = prepared(accelerator)
            losses.append(train(accelerator, model, optimizer, range(8)))
    assert losses[0] == losses[1] != losses[2]
    assert losses[0][-1] == pytest.approx(losses[2][-1], rel=0.05)


RECIPES: dict[str, Any] = {
    "rowwise": TorchaoRecipe(scaling="rowwise"),
    "mxfp8": TorchaoRecipe(scaling="mxfp8"),
    "bf16": None,
}


def run_of(name: str, folder: Path) -> Accelerator:
    mode = "bf16" if name == "bf16" else "fp8"
    return make(RECIPES[name], mixed_precision=mode, project_dir=folder)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("rowwise", "rowwise"), ("rowwise", "mxfp8"), ("rowwise", "bf16"), ("bf16", "mxfp8")],
)
@pytest.mark.slow
def test_a_checkpoint_loads_into_any_recipe(saved: str, loaded: str, tmp_path: Path) -> None:
    with run_of(saved, tmp_path) as accelerator:
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, range(3))
        accelerator.save_state()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        after = train(accelerator, model, optimizer, range(3, 6))
    with run_of(loaded, tmp_path) as accelerator:
        model, optimizer = prepared(accelerator)
        accelerator.load_state()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        resumed = train(accelerator, model, optimizer, range(3, 6))
    assert (resumed == after) == (saved == loaded)
    assert resumed == pytest.approx(after, rel=0.1)


@pytest.mark.slow
def test_an_export_is_that_of_a_plain_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with make() as accelerator:
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, range(2))
        accelerator.save_model(model, tmp_path)
        plain = net()
        plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
        for name, value in accelerator.unwrap_model(model).state_dict().items():
            assert torch.equal(plain.state_dict()[name], value)


def train_in_stage_0() -> None:
    with make(backend="deepspeed", sections={"deepspeed": {"stage": 0}}):
        pass


@pytest.mark.slow
def test_stage_0_of_deepspeed_is_refused_when_the_run_is_composed(run_ranks) -> None:
    with pytest.raises(
        AssertionError, match="stage=0 with models that compute in bf16: DeepSpeed adds gradients"
    ):
        run_ranks(train_in_stage_0)


def test_a_recipe_is_a_value_that_can_be_changed_in_part() -> None:
    assert replace(TorchaoRecipe(), scaling="rowwise").name == "torchao_rowwise"
