"""What checkpoints hold beside the models that are trained: models in evaluation mode, the loss scale of fp16."""

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_sides import OURS, SIDES

pytest.importorskip("accelerate")


@pytest.mark.parametrize("with_hook", [False, True])
def test_models_in_evaluation_mode_are_saved_and_loaded_as_by_the_real_one(
    tmp_path: Path, with_hook: bool
) -> None:
    for side in SIDES:
        with side.accelerator() as accelerator:
            trained = accelerator.prepare(torch.nn.Linear(1, 1))
            frozen = torch.nn.Linear(2, 2)
            assert accelerator.prepare_model(frozen, evaluation_mode=True) is frozen
            assert accelerator.prepare_model(frozen, evaluation_mode=True) is frozen
            assert accelerator.prepare(frozen) is frozen
            seen: list[Any] = []

            def note(models: Any, weights: Any, folder: str, seen: list[Any] = seen) -> None:
                seen.append([sorted(each) for each in weights] + [len(models)])

            if with_hook:
                accelerator.register_save_state_pre_hook(note)
            before = frozen.weight.tolist()
            accelerator.save_state(str(tmp_path / side.name))
            assert seen == ([[["bias", "weight"], ["bias", "weight"], 2]] if with_hook else [])
            torch.nn.init.zeros_(frozen.weight)
            accelerator.load_state(str(tmp_path / side.name))
            assert frozen.weight.tolist() == before
            accelerator.free_memory()
            assert accelerator.prepare(trained) is trained


def test_the_loss_scale_goes_on_from_where_it_was_saved() -> None:
    found: list[dict[str, Any]] = []
    for loaded in (False, True):
        with OURS.accelerator(mixed_precision="fp16") as accelerator:
            model = torch.nn.Linear(1, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            if loaded:
                accelerator.scaler.load_state_dict(found[0])
            for value in (1.0, float("inf"), 1.0):  # the second step overflows, which halves the scale
                accelerator.backward(model(torch.ones(1, 1)).mean() * value)
                optimizer.step()
                optimizer.zero_grad()
            assert accelerator.scaler.is_enabled()
            assert accelerator.scaler.get_scale() == accelerator.scaler.state_dict()["scale"]
            found.append(accelerator.scaler.state_dict())
    first, second = found
    assert first["_growth_tracker"] == second["_growth_tracker"] == 1
    assert second["scale"] == first["scale"] / 2
    torch.amp.GradScaler("cpu").load_state_dict(first)


def test_other_precisions_have_no_loss_scale() -> None:
    with OURS.accelerator(mixed_precision="bf16") as accelerator:
        assert accelerator.scaler is None
