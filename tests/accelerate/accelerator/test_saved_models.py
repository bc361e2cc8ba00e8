"""What checkpoints hold beside the models that are trained: models in evaluation mode, the loss scale of fp16."""

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_sides import OURS, SIDES, THEIRS, Side

pytest.importorskip("accelerate")


@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.default_cases("True")
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


def prepared_models(accelerator: Any, *, evaluates_first: bool) -> list[torch.nn.Module]:
    """Return a trained model and one in evaluation mode, whose last weight is tied to its first."""
    trained = torch.nn.Linear(2, 1)
    tied: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    if evaluates_first:
        accelerator.prepare_model(tied, evaluation_mode=True)
    accelerator.prepare(trained, torch.optim.AdamW(trained.parameters(), lr=0.1))
    if not evaluates_first:
        accelerator.prepare_model(tied, evaluation_mode=True)
    return [trained, tied]


@pytest.mark.parametrize("evaluates_first", [True, False])
def test_models_in_evaluation_mode_of_the_real_ones_checkpoint_are_loaded(
    tmp_path: Path, evaluates_first: bool
) -> None:
    saved: list[Any] = []
    for side in (THEIRS, OURS):
        with side.accelerator() as accelerator:
            models = prepared_models(accelerator, evaluates_first=evaluates_first)
            if side is THEIRS:
                accelerator.save_state(str(tmp_path))
            else:
                accelerator.load_state(str(tmp_path))
            saved.append([value.tolist() for model in models for value in model.state_dict().values()])
    assert saved[0] == saved[1]
    with OURS.accelerator() as accelerator:
        trained = torch.nn.Linear(2, 1)
        accelerator.prepare(trained, torch.optim.AdamW(trained.parameters(), lr=0.1))
        with pytest.raises(ValueError, match="holds 2 models, and this run has 1"):
            accelerator.load_state(str(tmp_path))


def register_own_hooks(accelerator: Any, place: int, *, pops_weights: bool) -> None:
    """Register the hooks of a program that saves and loads one of its models by itself, as Diffusers' scripts do."""

    def save(models: Any, weights: Any, folder: str) -> None:
        torch.save(models[place].state_dict(), Path(folder) / "own.pt")
        if pops_weights:
            weights.pop(place)

    def load(models: Any, folder: str) -> None:
        own = torch.load(Path(folder) / "own.pt")
        models.pop(place).load_state_dict({name: torch.full_like(value, 7.0) for name, value in own.items()})

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def values_of(model: torch.nn.Module) -> list[Any]:
    return [value.tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("evaluates_first", [True, False])
@pytest.mark.parametrize(("writer", "pops_weights"), [(OURS, True), (THEIRS, True), (THEIRS, False)])
@pytest.mark.default_cases("writer0-True-False-0", "writer0-True-True-1")
def test_a_model_that_a_hook_takes_out_of_the_list_keeps_what_the_hook_loaded(
    tmp_path: Path, place: int, evaluates_first: bool, writer: Side, pops_weights: bool
) -> None:
    others: list[Any] = []
    for side in (writer, OURS):
        with side.accelerator() as accelerator:
            models = prepared_models(accelerator, evaluates_first=evaluates_first)
            register_own_hooks(accelerator, place, pops_weights=pops_weights)
            other, taken = models if evaluates_first == (place == 0) else models[::-1]
            if others:
                accelerator.load_state(str(tmp_path))
                assert {
                    *taken.state_dict()["weight" if taken is models[0] else "0.weight"].flatten().tolist()
                } == {7.0}
            else:
                accelerator.save_state(str(tmp_path))
            others.append(values_of(other))
    assert others[0] == others[1]


def test_without_its_hook_a_model_that_is_not_in_the_real_ones_files_is_missed(tmp_path: Path) -> None:
    for side in (THEIRS, OURS):
        with side.accelerator() as accelerator:
            prepared_models(accelerator, evaluates_first=False)
            if side is THEIRS:
                register_own_hooks(accelerator, 0, pops_weights=True)
                accelerator.save_state(str(tmp_path))
            else:
                with pytest.raises(ValueError, match=r"holds 1 models, and this run has 2.*kept_models"):
                    accelerator.load_state(str(tmp_path))


def losses_and_scales(accelerator: Any, model: Any, optimizer: Any) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for number in range(4):
        loss = model(torch.full((2, 4), 0.1 * number)).square().mean()
        accelerator.backward(loss * (float("inf") if number == 1 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), accelerator.scaler.get_scale()))
    return found


def test_a_run_in_fp16_goes_on_with_the_losses_and_the_scale_it_had(tmp_path: Path) -> None:
    found: list[Any] = []
    handler = OURS("accelerate.utils.GradScalerKwargs")(init_scale=1024.0, growth_interval=2)
    for is_loaded in (False, True):
        with OURS.accelerator(mixed_precision="fp16", kwargs_handlers=[handler]) as accelerator:
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            if is_loaded:
                accelerator.load_state(str(tmp_path))
            else:
                losses_and_scales(accelerator, model, optimizer)
                accelerator.save_state(str(tmp_path))
            state = accelerator.scaler.state_dict()
            found.append((state, losses_and_scales(accelerator, model, optimizer)))
    assert found[0] == found[1]
    assert len({scale for _, scale in found[0][1]}) > 1


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


def test_other_precisions_have_no_loss_scale_and_take_a_scaler_that_is_not_enabled() -> None:
    with OURS.accelerator(mixed_precision="bf16") as accelerator:
        assert accelerator.scaler is None
        idle = torch.amp.GradScaler("cpu", enabled=False)
        accelerator.scaler = idle
        assert accelerator.scaler is idle
        accelerator.scaler = None
        assert accelerator.scaler is None


def test_a_run_in_fp16_keeps_its_own_scale() -> None:
    with OURS.accelerator(mixed_precision="fp16") as accelerator:
        accelerator.scaler = accelerator.scaler
        for other in (None, torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")):
            with pytest.raises(ValueError, match=r"drivetrain scales.*pass GradScalerKwargs"):
                accelerator.scaler = other
