"""What a recipe keeps from step to step, through checkpoints: an amax history, as delayed scaling has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain_precision import (
    LayerFilter,
    PrecisionError,
    TorchaoRecipe,
    convert_model,
    load_recipe_state,
    recipe_state,
)
from optional_modules import skip_without

skip_without("torchao")  # an extra of drivetrain-precision brings it


@dataclass(frozen=True, kw_only=True)
class Remembering:
    """The recipe of torchao, whose layers remember the largest values of their last inputs."""

    length: int = 4
    name: str = "remembering"
    inner: TorchaoRecipe = field(default_factory=lambda: TorchaoRecipe(layers=LayerFilter(skip_first=False)))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)

    def convert(self, module: nn.Module) -> nn.Module:
        layer: Any = self.inner.convert(module)
        layer.amax_history = torch.zeros(
            self.length
        )  # no buffer: DDP would give all ranks those of the first
        layer.remembering = layer.register_forward_pre_hook(_remember)
        return layer

    def restore(self, module: nn.Module) -> nn.Module:
        layer: Any = module
        layer.remembering.remove()
        del layer.amax_history, layer.remembering
        return self.inner.restore(module)

    def state(self, module: nn.Module) -> Mapping[str, Tensor]:
        layer: Any = module
        return {"amax_history": layer.amax_history}


def _remember(layer: Any, inputs: tuple[Tensor, ...]) -> None:
    layer.amax_history.copy_(
        torch.cat([inputs[0].detach().abs().max().float()[None], layer.amax_history[:-1]])
    )


def net(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))


def make(folder: Path, recipe: Any) -> Accelerator:
    sections = {"run": {"show_plan": False}}
    options: dict[str, Any] = {"cpu": True, "mixed_precision": "fp8", "project_dir": folder}
    return Accelerator(fp8_recipe=recipe, sections=sections, **options)


def histories(model: nn.Module) -> list[list[float]]:
    return [each.amax_history.tolist() for each in model.modules() if hasattr(each, "amax_history")]


def _is_of(widths: tuple[int, ...], name: str, layer: nn.Linear) -> bool:
    return layer.in_features in widths


def saved(folder: Path, recipe: Any = None, *, num_steps: int = 3) -> list[list[float]]:
    """Train each rank on batches of its own, save, and return the histories of this rank."""
    with make(folder, recipe or Remembering()) as accelerator:
        plain = net()
        model, optimizer = accelerator.prepare(plain, SGD(plain.parameters(), lr=0.1))
        for step in range(num_steps):
            torch.manual_seed(10 * accelerator.process_index + step)
            accelerator.backward(model(torch.randn(4, 16)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state()
        return histories(plain)


def loaded(folder: Path, recipe: Any = None) -> list[list[float]]:
    with make(folder, recipe or Remembering()) as accelerator:
        plain = net()
        accelerator.prepare(plain, SGD(plain.parameters(), lr=0.1))
        accelerator.load_state()
        return histories(plain)


def saved_and_loaded(folder: Path) -> list[Any]:
    return [saved(folder), loaded(folder)]


def test_histories_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    kept = saved(tmp_path)
    assert [len(set(one)) for one in kept] == [4, 4]  # three steps, and a zero of before
    assert loaded(tmp_path) == kept


@pytest.mark.slow
def test_each_rank_gets_its_own_histories_back_and_another_number_of_ranks_those_of_the_first(
    tmp_path: Path, run_ranks: Any
) -> None:
    ran = run_ranks(saved_and_loaded, tmp_path)
    assert ran[0][0] != ran[1][0]
    assert [after for _, after in ran] == [before for before, _ in ran]
    assert loaded(tmp_path) == ran[0][0]


def test_histories_of_another_length_are_refused_in_words(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(
        PrecisionError,
        match=r"0\.amax_history was saved in the shape \(4,\), and this recipe keeps it in the shape \(6,\): give",
    ):
        loaded(tmp_path, Remembering(length=6))


def test_nothing_is_loaded_where_one_shape_is_another() -> None:
    model, recipe = net(), Remembering()
    convert_model(model, recipe)
    state = {"0.amax_history": torch.ones(4), "1.amax_history": torch.ones(5)}
    with pytest.raises(PrecisionError, match=r"1\.amax_history was saved in the shape \(5,\)"):
        load_recipe_state(model, recipe, state)
    assert not any(each.any() for each in recipe_state(model, recipe).values())


def test_layers_that_the_checkpoint_has_no_history_of_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = saved(tmp_path, Remembering(inner=TorchaoRecipe()))
    assert len(kept) == 1
    resumed = loaded(tmp_path)
    assert resumed == [[0.0] * 4, *kept]
    assert (
        "the checkpoint has no state of remembering for 0.amax_history: these begin as if new" in caplog.text
    )


def test_a_checkpoint_of_another_recipe_has_no_histories(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    saved(tmp_path, TorchaoRecipe(scaling="rowwise"))
    assert loaded(tmp_path) == [[0.0] * 4] * 2
    assert "was trained in torchao_rowwise, this run trains in remembering" in caplog.text


def test_a_checkpoint_in_which_other_models_were_converted_loads_without_histories(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for widths in ((16, 32), (16,)):
        layers = LayerFilter(skip_first=False, skip_last=False, accept=partial(_is_of, widths))
        with make(tmp_path, Remembering(inner=TorchaoRecipe(layers=layers))) as accelerator:
            first, second = net(), nn.Sequential(nn.Linear(32, 32))
            accelerator.prepare(first, second)
            if len(widths) == 2:
                accelerator.save_state()
            else:
                accelerator.load_state()
    assert (
        "the checkpoint holds 2 models converted to it, not 1, this run trains in remembering" in caplog.text
    )
