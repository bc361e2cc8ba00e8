"""A run whose replicas have drifted apart is not saved."""

from pathlib import Path

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
    is_empty = not list(folder.glob("checkpoints/*"))
    with accelerator.gathered(model, write=True):
        pass
    accelerator.save_state()
    accelerator.end_training()
    return said, is_empty


def test_a_run_whose_replicas_drifted_apart_is_not_saved_until_they_agree(run_ranks, tmp_path) -> None:
    for said, is_empty in run_ranks(save_after_drifting, tmp_path):
        assert "weight of Linear differs on ranks 1 from rank 0" in said
        assert is_empty
    assert list(tmp_path.glob("checkpoints/step-1/manifest.json"))


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
