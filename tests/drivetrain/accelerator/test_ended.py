"""What an Accelerator answers after `end_training`, on one rank and on two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from drivetrain import Accelerator


def said_by(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError, match=r"after .*end_training\(\)") as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("num_processes", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2)])
@pytest.mark.default_cases("2")
def test_what_needs_the_run_is_refused_alike_on_any_number_of_ranks(
    tmp_path: Path, num_processes: int
) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, log_with="jsonl")
    linear, loss = nn.Linear(1, 1), torch.ones((), requires_grad=True)
    model, optimizer = accelerator.prepare(linear, SGD(linear.parameters(), lr=0.1))
    accelerator.init_trackers("run")
    accelerator.end_training()
    another = nn.Linear(1, 1)
    calls: dict[str, Callable[[], Any]] = {
        "prepare": lambda: accelerator.prepare(another, SGD(another.parameters(), lr=0.1)),
        "prepare_loader": lambda: accelerator.prepare_loader(DataLoader(torch.ones(4)), even="uneven"),
        "accumulate": lambda: accelerator.accumulate(model),
        "backward": lambda: accelerator.backward(loss),
        "gather": lambda: accelerator.gather(loss),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(loss),
        "reduce": lambda: accelerator.reduce(loss),
        "wait_for_everyone": accelerator.wait_for_everyone,
        "main_process_first": accelerator.main_process_first,
        "save_state": accelerator.save_state,
        "load_state": accelerator.load_state,
        "save_model": lambda: accelerator.save_model(model, tmp_path),
        "log": lambda: accelerator.log({"loss": 1.0}),
        "init_trackers": lambda: accelerator.init_trackers("run"),
    }
    for name, call in calls.items():
        said = f"{name}() after end_training(), which has finished saves and trackers"
        assert said_by(call).startswith(said), name
    assert said_by(optimizer.step).startswith("step() of SGD after free_memory(), end_training()")
    accelerator.end_training()
    accelerator.free_memory()
    kept = isinstance(accelerator, Accelerator), type(accelerator).__name__, accelerator.is_main_process
    assert kept == (True, "Accelerator", accelerator.process_index == 0)
    assert accelerator.unwrap_model(model) is linear
    assert accelerator.plan.as_dict()["settings"]
    assert not list(tmp_path.rglob("manifest.json"))


def test_an_accelerator_of_a_class_of_the_users_ends_too() -> None:
    class Mine(Accelerator):
        def log_loss(self, loss: float) -> None:
            self.log({"loss": loss})

    accelerator = Mine(cpu=True)
    accelerator.end_training()
    assert isinstance(accelerator, Mine)
    with pytest.raises(RuntimeError, match=r"^log\(\) after end_training\(\)"):
        accelerator.log_loss(1.0)


# What reads back, ends, or asks for nothing of the run.
STAY = {
    "autocast", "clear", "clip_grad_norm_", "clip_grad_value_", "end_training", "free_memory", "get_state_dict",
    "get_tracker", "has_prepared", "load_loss_scale_state", "loss_scale_state", "num_steps", "on_last_process",
    "on_local_main_process", "on_main_process", "on_process", "prepared_of", "print", "profile",
    "record_autocast", "skip_first_batches", "split_between_processes", "unregister_from_checkpointing",
    "unwrap_model", "wait_for_save",
}  # fmt: skip


def test_every_method_is_refused_after_the_end_or_is_known_to_stay() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.end_training()
    methods = {name for name in dir(Accelerator) if not name.startswith("_")}
    methods = {name for name in methods if callable(getattr(Accelerator, name, None))}
    assert methods >= STAY
    for name in methods - STAY:
        assert name in said_by(getattr(accelerator, name))
