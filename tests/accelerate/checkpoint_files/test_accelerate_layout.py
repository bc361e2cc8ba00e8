"""States in Accelerate's own files, written and read here and by the installed Accelerate."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accelerate_checkpoint_runs import Counter, run_of
from accelerate_sides import OURS
from drivetrain_accelerate import write_accelerate_layout
from drivetrain_accelerate.accelerator.accelerator import Accelerator
from drivetrain_accelerate.checkpoint_files import run_files
from drivetrain_accelerate.plugins.deepspeed_plugin import DeepSpeedPlugin
from drivetrain_accelerate.plugins.fsdp_plugin import FullyShardedDataParallelPlugin

real: Any = pytest.importorskip("accelerate.checkpointing")
RealAccelerator: Any = pytest.importorskip("accelerate").Accelerator
RealState: Any = pytest.importorskip("accelerate").PartialState


@pytest.fixture
def real_ranks() -> Iterator[None]:
    """The real one tells what it does through a log that asks for the ranks."""
    RealState(cpu=True)
    yield
    RealState._reset_state()


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_the_real_one_continues_what_ours_wrote(tmp_path: Path) -> None:
    with run_of(Accelerator) as run:
        run.train(5)
        assert write_accelerate_layout(run.accelerator, tmp_path / "state") == tmp_path / "state"
        expected = run.values(), draws()
    with run_of(RealAccelerator, seed=1) as run:
        run.accelerator.load_state(str(tmp_path / "state"))
        assert (run.values(), draws()) == expected
        run.accelerator.save_state(str(tmp_path / "real"))
    assert sorted(os.listdir(tmp_path / "state")) == sorted(os.listdir(tmp_path / "real"))


def written_by_ours(folder: str) -> tuple[dict[str, Any], list[float]]:
    with run_of(Accelerator) as run:
        run.train(3)
        write_accelerate_layout(run.accelerator, folder)
        return run.values(), draws()


def read_by_the_real_one(folder: str) -> tuple[dict[str, Any], list[float]]:
    with run_of(RealAccelerator, seed=1, ends=False) as run:
        run.accelerator.load_state(folder)
        return run.values(), draws()


@pytest.mark.slow
def test_the_real_one_continues_on_two_processes(tmp_path: Path, run_ranks: Any) -> None:
    expected = run_ranks(written_by_ours, str(tmp_path))
    assert {path.name for path in tmp_path.glob("random*")} == {"random_states_0.pkl", "random_states_1.pkl"}
    assert run_ranks(read_by_the_real_one, str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("plugin", "instead"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, r"save_fsdp_model\(\) and save_fsdp_optimizer"),
        ({"deepspeed_plugin": DeepSpeedPlugin()}, r"save_model\(\) writes the weights"),
    ],
)
def test_divided_models_are_refused_with_what_to_call(tmp_path: Path, plugin: Any, instead: str) -> None:
    with OURS.accelerator(**plugin) as accelerator, pytest.raises(RuntimeError, match=instead):
        write_accelerate_layout(accelerator, tmp_path)


def test_ours_continues_what_the_real_one_wrote(tmp_path: Path) -> None:
    with run_of(RealAccelerator) as run:
        run.train(5)
        run.accelerator.save_state(str(tmp_path))
        expected = run.values(), draws()
    with run_of(Accelerator, seed=1) as run:
        run.accelerator.load_state(str(tmp_path))
        assert (run.values(), draws()) == expected
        assert len(run.train(3)) == 3


@pytest.mark.usefixtures("real_ranks")
def test_the_scale_of_fp16_is_written_as_torchs(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run_files.save_accelerator_state(str(tmp_path), [model.state_dict()], [], [], [], 0, 7, scaler)
    other = torch.amp.GradScaler("cpu")
    found = real.load_accelerator_state(str(tmp_path), [model], [], [], [], 0, other)
    assert found == {"step": 7}
    assert other.get_scale() == 8.0


def trained(rate: float) -> tuple[list[nn.Module], torch.optim.Optimizer, Any]:
    """Return models, their optimizer after a step, and its schedule."""
    models: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(1, 1)]
    optimizer = torch.optim.AdamW(models[0].parameters(), lr=rate)
    models[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return models, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.usefixtures("real_ranks")
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("direction", ["to the real one", "from the real one"])
def test_states_are_exchanged_with_the_real_one(tmp_path: Path, safe: bool, direction: str) -> None:
    save, load = run_files.save_accelerator_state, real.load_accelerator_state
    if direction == "from the real one":
        save, load = real.save_accelerator_state, run_files.load_accelerator_state
    models, optimizer, scheduler = trained(0.001)
    states: list[Any] = [model.state_dict() for model in models]
    folder = save(str(tmp_path), states, [optimizer], [scheduler], [], 0, 4, safe_serialization=safe)
    drawn = draws()
    assert folder == tmp_path
    others, other, schedule = trained(1.0)
    assert load(str(tmp_path), others, [other], [schedule], [], 0) == {"step": 4}
    assert draws() == drawn
    for mine, read in zip(models, others, strict=True):
        assert all(map(torch.equal, mine.state_dict().values(), read.state_dict().values()))
    assert str(other.state_dict()) == str(optimizer.state_dict())
    assert schedule.state_dict() == scheduler.state_dict()


@pytest.mark.usefixtures("real_ranks")
def test_a_rank_without_a_file_of_its_generators_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_files.save_accelerator_state(str(tmp_path), [], [], [], [], 0, 7)
    before = random.getstate()
    for module in (real, run_files):
        assert module.load_accelerator_state(str(tmp_path), [], [], [], [], 1) == {}
    assert random.getstate() == before
    assert "random_states_1.pkl is not there" in caplog.text


@pytest.mark.usefixtures("real_ranks")
def test_custom_objects_are_exchanged_too(tmp_path: Path) -> None:
    mine, theirs = Counter(), Counter()
    run_files.save_custom_state(Counter(3), str(tmp_path), 2)
    real.load_custom_state(theirs, str(tmp_path), 2)
    real.save_custom_state(Counter(5), str(tmp_path), 0)
    run_files.load_custom_state(mine, str(tmp_path))
    assert (mine.number, theirs.number) == (5, 3)
    with pytest.raises(ValueError, match="say cpu, on_device or None"):
        run_files.load_accelerator_state(str(tmp_path), [], [], [], [], 0, map_location="gpu")
