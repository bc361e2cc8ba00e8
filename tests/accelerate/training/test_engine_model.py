"""A model under DeepSpeed has the methods of an engine by which programs save it and look at it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_sides import said
from drivetrain_accelerate.accelerator.accelerator import Accelerator
from drivetrain_accelerate.plugins.deepspeed_objects import DummyOptim, DummyScheduler
from drivetrain_accelerate.plugins.deepspeed_plugin import DeepSpeedPlugin
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.training.engine_model import DeepSpeedSchedulerWrapper, EngineMethods
from drivetrain_checkpoint import NoCheckpointError
from optional_modules import skip_without

skip_without("deepspeed")
pytest.importorskip("accelerate")  # the rows of `conftest.py` that need it

WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 4, "warmup_type": "linear"}


def accelerator_of(stage: int) -> Any:
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
    }
    return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


def prepared(accelerator: Any, seed: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    model[0].bias.requires_grad_(False)
    optimizer = DummyOptim([each for each in model.parameters() if each.requires_grad], lr=0.1)
    return accelerator.prepare(model, optimizer, DummyScheduler(optimizer))


def step(accelerator: Any, model: Any, optimizer: Any, schedule: Any) -> tuple[float, float]:
    """Take a step; return the loss, and the norm of the gradients by the engine's word."""
    loss = model(torch.ones(2, 3)).square().mean()
    accelerator.backward(loss, model=model)
    norm = model.get_global_grad_norm()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss.item(), norm


def engine_run(folder: str, stage: int) -> dict[str, Any]:
    accelerator = accelerator_of(stage)
    model, optimizer, schedule = prepared(accelerator, seed=0)
    rates, norms = [], []
    for _ in range(3):
        norms.append(step(accelerator, model, optimizer, schedule)[1])
        rates.append(optimizer.param_groups[0]["lr"])
    after_step = model.get_global_grad_norm()
    model.save_checkpoint(folder, client_state={"epoch": 7})
    model.save_checkpoint(f"{folder}/trained", exclude_frozen_parameters=True)
    model.save_16bit_model(folder)
    kept = {name: each.clone() for name, each in accelerator.get_state_dict(model).items()}
    expected = [step(accelerator, model, optimizer, schedule)[0] for _ in range(2)]
    other, its_optimizer, its_schedule = prepared(accelerator, seed=1)
    place, client_state = other.load_checkpoint(folder)
    rate = its_optimizer.param_groups[0]["lr"]
    found = [step(accelerator, other, its_optimizer, its_schedule)[0] for _ in range(2)]
    strictly = said(lambda: other.load_checkpoint(f"{folder}/trained"))
    other.load_checkpoint(f"{folder}/trained", load_module_strict=False)
    whole = torch.load(Path(folder) / "pytorch_model.bin")
    result = {
        "kinds": [type(model).__name__, isinstance(schedule, DeepSpeedSchedulerWrapper)],
        "stage": [model.config["zero_optimization"]["stage"], model.zero_optimization_stage()],
        "rates": rates,
        "rate": rate,
        "norms": norms,
        "after_step": after_step,
        "expected": expected,
        "found": found,
        "strictly": strictly,
        "place": Path(place).name,
        "client_state": dict(client_state),
        "whole": all(torch.equal(each, kept[name]) for name, each in whole.items()),
        "backward": said(lambda: model.backward(torch.zeros(()))),
        "step": said(model.step),
    }
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage]
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.slow
def test_an_engine_is_saved_and_looked_at(
    tmp_path: Path, run_ranks: Any, deepspeed_operators: None, stage: int
) -> None:
    for found in run_ranks(engine_run, str(tmp_path), stage):
        assert found["kinds"] == ["DeepSpeedEngine", True]
        assert found["stage"] == [stage, stage]
        # Once a step, whatever the number of processes.
        assert found["rates"] == pytest.approx([0, 0.025, 0.05])
        assert found["rate"] == pytest.approx(0.05)
        assert min(found["norms"]) > 0.5  # before they are clipped
        assert found["after_step"] == pytest.approx(found["norms"][-1])
        assert found["found"] == pytest.approx(found["expected"])
        assert "load_module_strict=False" in found["strictly"]
        assert (found["place"], found["client_state"]) == ("global_step3", {"epoch": 7})
        assert found["whole"]
        assert "call accelerator.backward(loss)" in found["backward"]
        assert "call optimizer.step()" in found["step"]


def trained_after_free_memory(stage: int) -> tuple[str, list[float], list[float]]:
    """Return how the former optimizer is refused, and the losses before and after the memory is freed."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    refusal, losses = "", []
    for is_first in (True, False):
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        trained, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            loss = trained(torch.ones(2, 3)).square().mean()
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.free_memory()
        if is_first:
            refusal = said(partial(accelerator.prepare, model, optimizer))
    AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage]
    return refusal, losses[:3], losses[3:]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.slow
def test_a_model_trains_on_after_free_memory_with_a_new_optimizer(
    run_ranks: Any, deepspeed_operators: None, stage: int
) -> None:
    for refusal, before, after in run_ranks(trained_after_free_memory, stage):
        assert refusal.startswith("ValueError: SGD holds partitions of a DeepSpeed engine")
        assert "build a new Trainer" in refusal
        losses = [*before, *after]
        assert losses == sorted(losses, reverse=True)
        assert after[0] < before[-1]


def test_files_of_deepspeeds_own_are_refused(tmp_path: Path) -> None:
    engine = EngineMethods()
    with pytest.raises(FileNotFoundError, match="say tag="):
        engine.load_checkpoint(str(tmp_path))
    (tmp_path / "latest").write_text("global_step1\n")
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(NoCheckpointError, match="zero_to_fp32"):
        engine.load_checkpoint(str(tmp_path))
