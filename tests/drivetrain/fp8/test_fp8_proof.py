"""Whether a run in fp8 proves that it is one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain_precision import PrecisionError, Support, TorchaoRecipe
from optional_modules import skip_without

skip_without("torchao")  # an extra of drivetrain-precision brings it


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def make(recipe: Any = None, **options: Any) -> Accelerator:
    sections = {"run": {"show_plan": False}}
    given: dict[str, Any] = {"cpu": True, "mixed_precision": "fp8", **options}
    return Accelerator(fp8_recipe=recipe, sections=sections, **given)


def batch(step: int = 0) -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(step))


def prepared(accelerator: Accelerator) -> tuple[nn.Module, Any]:
    model = net()
    return accelerator.prepare(model, SGD(model.parameters(), lr=0.1))


def steps(accelerator: Accelerator, model: nn.Module, optimizer: Any, count: int = 1) -> None:
    for step in range(count):
        rows = batch(step).to(accelerator.device)
        accelerator.backward(model(rows).float().square().mean(), model=model)
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A recipe that says the device has its units."""

    inner: TorchaoRecipe = field(default_factory=lambda: TorchaoRecipe(scaling="mxfp8"))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)

    def support(self, device: torch.device) -> Support:
        return Support(level="native", reason=f"{device} has units for it")


def test_no_product_on_a_device_that_has_the_units_is_an_error() -> None:
    with make(Claimed()) as accelerator:
        model, optimizer = prepared(accelerator)
        with pytest.raises(
            PrecisionError,
            match=r"none of the 8 matrix products of the first step ran in torchao_mxfp8: the .* of Sequential",
        ):
            steps(accelerator, model, optimizer)


@pytest.mark.slow
def test_a_run_under_a_profiler_is_told_not_to_be_counted_and_counted_once_that_ends(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with make(project_dir=tmp_path) as accelerator:
        model, optimizer = prepared(accelerator)
        with torch.profiler.profile():
            steps(accelerator, model, optimizer, 9)
            assert "fp8 products" not in accelerator.plan.facts
            steps(accelerator, model, optimizer, 5)
        told = accelerator.plan.facts["fp8 products"]
        assert told.startswith("not counted in 10 steps: another profiler recorded")
        assert told in (tmp_path / "plan.json").read_text()
        assert caplog.text.count("after 10 steps nothing shows that matrix products run in torchao_") == 1
        steps(accelerator, model, optimizer)
        assert accelerator.plan.facts["fp8 products"].startswith("3 of 8")
    assert caplog.text.count("nothing shows") == 1


def test_a_run_that_ends_before_a_step_could_be_counted_tells_so(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with torch.profiler.profile(), make(project_dir=tmp_path) as accelerator:
        model, optimizer = prepared(accelerator)
        steps(accelerator, model, optimizer)
    assert "not counted in 1 step: another profiler recorded" in (tmp_path / "plan.json").read_text()
    assert "mixed_precision='fp8': after 1 step nothing shows" in caplog.text


@pytest.mark.slow
def test_a_run_that_compiles_in_each_step_is_told_not_to_be_counted(caplog: pytest.LogCaptureFixture) -> None:
    with make() as accelerator:
        plain = net()
        model, optimizer = accelerator.prepare(
            torch.compile(plain, backend="aot_eager"), SGD(plain.parameters(), lr=0.1)
        )
        for _ in range(2):
            steps(accelerator, model, optimizer)
            torch.compiler.reset()
    assert "after 2 steps nothing shows that matrix products run in torchao_tensorwise" in caplog.text
    assert "torch.compile was compiling" in accelerator.plan.facts["fp8 products"]


def test_a_step_of_a_model_that_stays_in_bf16_before_one_in_fp8_proves_nothing_and_is_no_error() -> None:
    with make(Claimed(inner=TorchaoRecipe())) as accelerator:
        actor, critic = net(), nn.Sequential(nn.Linear(16, 7), nn.Linear(7, 1))
        by_actor, by_critic = (SGD(model.parameters(), lr=0.1) for model in (actor, critic))
        actor, critic, by_actor, by_critic = accelerator.prepare(actor, critic, by_actor, by_critic)
        steps(accelerator, critic, by_critic)
        assert "fp8 products" not in accelerator.plan.facts
        steps(accelerator, actor, by_actor)
        assert accelerator.plan.facts["fp8 products"].startswith("3 of 8 matrix products of the first step")


class Unused(nn.Sequential):
    """A model that does not call its middle layer, which alone is converted."""

    def forward(self, input: Tensor) -> Tensor:
        return self[4](self[0](input))


def unused() -> Unused:
    return Unused(*net())


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_emulation_that_can_be_counted_and_runs_no_product_is_an_error(scaling: Any) -> None:
    with make(TorchaoRecipe(scaling=scaling)) as accelerator:
        model = unused()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        with pytest.raises(
            PrecisionError,
            match=rf"none of the 5 .* ran in torchao_{scaling}: the converted layers of Unused were not called",
        ):
            steps(accelerator, model, optimizer)


@pytest.mark.slow
def test_of_several_converted_models_the_one_that_runs_no_product_is_named() -> None:
    with make() as accelerator:
        models: list[nn.Module] = [net(), unused()]
        optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
        *models, first, _ = accelerator.prepare(*models, *optimizers)
        accelerator.backward(sum(model(batch()).float().mean() for model in models), model=models)
        with pytest.raises(
            PrecisionError,
            match=r"in the forwards of Unused \(converted model 2 of 2\): the converted layers of Unused",
        ):
            first.step()


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_run_on_each_kind_of_device_proves_its_products(kind: str, scaling: Any) -> None:
    recipe = TorchaoRecipe(scaling=scaling)
    support = recipe.support(torch.device(kind))
    if support.level == "none":
        pytest.skip(support.reason)
    with make(recipe, cpu=kind == "cpu") as accelerator:
        assert accelerator.device.type == kind
        model, optimizer = prepared(accelerator)
        steps(accelerator, model, optimizer, 2)
        told = accelerator.plan.facts["fp8 products"]
        assert told.startswith(f"3 of 8 matrix products of the first step ran in torchao_{scaling}")
        assert ("a CPU computes it" in told) == (kind == "cpu")
