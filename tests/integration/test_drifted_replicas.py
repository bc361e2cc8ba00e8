"""A run whose replicas have drifted apart is not saved."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain_backends import DriftedReplicasError


def save_after_drifting(folder: Path) -> tuple[str, bool]:
    accelerator = Accelerator(cpu=True, project_dir=folder, sections={"run": {"show_plan": False}})
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    with torch.no_grad():
        accelerator.unwrap_model(model).weight += accelerator.process_index
    said = ""
    try:
        accelerator.save_state()
    except DriftedReplicasError as error:
        said = str(error)
    accelerator.wait_for_everyone()
    is_empty = not list(folder.glob("checkpoints/step-*"))
    with accelerator.gathered(model, write=True):
        pass
    accelerator.save_state()
    accelerator.end_training()
    return said, is_empty


def save_in_background(folder: Path, staging: str) -> list[str]:
    """Drift before a save, in a frozen weight that is tied; then after it, which is not in it."""
    sections = {"run": {"show_plan": False}, "checkpoint": {"background": True, "staging": staging}}
    accelerator = Accelerator(cpu=True, project_dir=folder, sections=sections)
    torch.manual_seed(0)
    model, teacher = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    teacher[1].weight = teacher[0].weight
    model, teacher, optimizer = accelerator.prepare(model, teacher, SGD(model.parameters(), lr=0.1))
    said: list[str] = []
    for drifts_before in (True, False):
        accelerator.backward(teacher(model(torch.ones(1, 2))).sum())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            teacher[1].weight += drifts_before * accelerator.process_index
        accelerator.save_state()
        try:
            with accelerator.gathered(teacher, write=True), torch.no_grad():  # waits for the copies
                teacher[0].weight += accelerator.process_index
            accelerator.wait_for_save()
            said.append("saved")
        except DriftedReplicasError as error:
            said.append(str(error))
    accelerator.end_training()
    return said


def test_a_run_whose_replicas_drifted_apart_is_not_saved_until_they_agree(run_ranks, tmp_path) -> None:
    for said, is_empty in run_ranks(save_after_drifting, tmp_path):
        assert "weight of Linear differs on ranks 1 from rank 0" in said
        assert is_empty
    assert list(tmp_path.glob("checkpoints/step-1/manifest.json"))


@pytest.mark.parametrize("staging", ["copy", "overlap"])
def test_a_background_save_tells_of_drift_when_it_is_waited_for(run_ranks, tmp_path, staging: str) -> None:
    for drifted, saved in run_ranks(save_in_background, tmp_path, staging):
        assert "0.weight of Sequential differs on ranks 1 from rank 0. " in drifted
        assert saved == "saved"
    assert [path.parent.name for path in tmp_path.glob("checkpoints/step-*/manifest.json")] == ["step-2"]


def drift_of_the_second_model() -> str:
    sections = {"run": {"show_plan": False}, "ddp": {"check_drift_every": 2}}
    with Accelerator(cpu=True, sections=sections) as accelerator:
        one, other = nn.Linear(2, 2), nn.Linear(2, 1)
        both = SGD([*one.parameters(), *other.parameters()], lr=0.1)
        one, other, optimizer = accelerator.prepare(one, other, both)
        with torch.no_grad():
            accelerator.unwrap_model(other).weight += accelerator.process_index
        try:
            for _ in range(2):
                accelerator.backward(other(one(torch.ones(1, 2))).sum())
                optimizer.step()
                optimizer.zero_grad()
        except DriftedReplicasError as error:
            return f"{optimizer.num_steps}: {error}"
    return "nothing"


def test_drift_of_every_model_that_an_optimizer_trains_is_told_every_n_steps(run_ranks) -> None:
    for said in run_ranks(drift_of_the_second_model):
        assert "weight of Linear differs on ranks 1 from rank 0" in said
