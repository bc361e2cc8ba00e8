"""Weights of models that no run divides: never prepared, or forgotten since; beside the real Accelerate."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerate_sides import OURS, THEIRS, on_sides

pytest.importorskip("accelerate")


def tied() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    return model


def weights_everywhere(accelerator: Any, folder: Path) -> list[dict[str, list[float]]]:
    """Return the weights of a model that is never prepared, and of one that is, over its life."""
    model = tied()
    average = copy.deepcopy(model)
    found: list[Any] = []

    def look(*models: torch.nn.Module) -> None:
        for each in models:
            target = folder / str(len(found))
            found.append(accelerator.get_state_dict(each))
            accelerator.save_model(each, str(target))
            found.append(load_file(target / "model.safetensors"))
            accelerator.save_model(each, str(target), safe_serialization=False)
            found.append(torch.load(target / "pytorch_model.bin"))

    prepared = accelerator.prepare(model)
    look(average, torch.nn.DataParallel(average))
    accelerator.free_memory()
    look(prepared, model)
    accelerator.end_training()
    look(prepared, average)
    assert all(value.device.type == "cpu" for each in found for value in each.values())
    return [{name: value.tolist() for name, value in each.items()} for each in found]


def test_models_that_are_whole_are_saved_whether_or_not_they_are_prepared(tmp_path: Path) -> None:
    found = on_sides(lambda each: weights_everywhere(each, tmp_path / type(each).__module__))
    assert found[0] == found[1]


def test_weights_of_offloaded_modules_are_read_for_it(tmp_path: Path) -> None:
    with OURS.accelerator() as accelerator:
        model = torch.nn.Linear(2, 2)
        before = model.weight.tolist()
        OURS("accelerate.hooks.attach_align_device_hook")(model, execution_device="cpu", offload=True)
        assert model.weight.is_meta
        accelerator.save_model(model, str(tmp_path))
        assert load_file(tmp_path / "model.safetensors")["weight"].tolist() == before


def test_a_divided_model_is_saved_by_the_run_that_divides_it_and_its_average_by_itself(
    tmp_path: Path,
) -> None:
    plugin = OURS("accelerate.FullyShardedDataParallelPlugin")(fsdp_version=2)
    with OURS.accelerator(fsdp_plugin=plugin) as accelerator:
        model = torch.nn.Linear(2, 2)
        average = copy.deepcopy(model)
        prepared = accelerator.prepare(model)
        assert set(accelerator.get_state_dict(average)) == set(accelerator.get_state_dict(prepared))
        accelerator.save_model(average, str(tmp_path))
        assert load_file(tmp_path / "model.safetensors")["weight"].equal(average.weight)
        accelerator.free_memory()
        calls: list[Callable[[Any], Any]] = [
            accelerator.get_state_dict,
            partial(accelerator.save_model, save_directory=str(tmp_path)),
        ]
        for take in calls:
            with pytest.raises(ValueError, match=r"2 parameters that are divided.*before free_memory"):
                take(prepared)
            with pytest.raises(TypeError, match="3 is not a model"):
                take(3)
        accelerator.end_training()


def on_each_rank(folder: str) -> bool:
    found: list[Any] = []
    for side in (THEIRS, OURS):
        with side.accelerator() as accelerator:
            model = tied()
            prepared = accelerator.prepare(model)
            accelerator.free_memory()
            accelerator.save_model(prepared, f"{folder}/{side.name}")
            accelerator.wait_for_everyone()
            state = accelerator.get_state_dict(prepared)
            found.append({name: value.tolist() for name, value in state.items()})
            found.append(sorted(load_file(f"{folder}/{side.name}/model.safetensors")))
            if side is OURS:
                accelerator.end_training()
                accelerator.save_model(prepared, f"{folder}/end")
    return found[:2] == found[2:]


@pytest.mark.slow
def test_ranks_save_a_wrapper_that_free_memory_has_forgotten(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(on_each_rank, str(tmp_path)) == [True, True]
    assert (tmp_path / "end" / "model.safetensors").is_file()
