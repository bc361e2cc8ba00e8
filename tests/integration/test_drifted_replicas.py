"""A run whose replicas have drifted apart is not saved."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain_backends import DriftedReplicasError
from plain_loop.accelerated import accelerator_of, take_steps


@pytest.mark.ranks(2)
def test_a_run_whose_replicas_drifted_apart_is_not_saved_until_they_agree(tmp_path: Path) -> None:
    with accelerator_of(project_dir=tmp_path) as accelerator:
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        take_steps(accelerator, model, optimizer, lambda _: model(torch.ones(1, 2)).sum(), [0])
        with torch.no_grad():
            accelerator.unwrap_model(model).weight += accelerator.process_index
        with pytest.raises(DriftedReplicasError, match="weight of Linear differs on ranks 1 from rank 0"):
            accelerator.save_state()
        accelerator.wait_for_everyone()
        assert not list(tmp_path.glob("checkpoints/step-*"))
        accelerator.wait_for_everyone()
        with accelerator.gathered(model, write=True):
            pass
        accelerator.save_state()
    assert list(tmp_path.glob("checkpoints/step-1/manifest.json"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("staging", ["copy", "overlap"])
def test_a_background_save_tells_of_drift_when_it_is_waited_for(tmp_path: Path, staging: str) -> None:
    """Drift before a save, in a frozen weight that is tied; then after it, which is not in it."""
    sections = {"checkpoint": {"background": True, "staging": staging}}
    with accelerator_of(project_dir=tmp_path, sections=sections) as accelerator:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        teacher = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
        teacher[1].weight = teacher[0].weight
        model, teacher, optimizer = accelerator.prepare(model, teacher, SGD(model.parameters(), lr=0.1))

        def save_and_wait() -> None:
            accelerator.save_state()
            with accelerator.gathered(teacher, write=True), torch.no_grad():  # waits for the copies
                teacher[0].weight += accelerator.process_index
            accelerator.wait_for_save()

        said = r"0\.weight of Sequential differs on ranks 1 from rank 0\. "
        for expected in (pytest.raises(DriftedReplicasError, match=said), nullcontext()):
            take_steps(accelerator, model, optimizer, lambda _: teacher(model(torch.ones(1, 2))).sum(), [0])
            with torch.no_grad():
                drifts = not isinstance(expected, nullcontext)
                teacher[1].weight += drifts * accelerator.process_index
            with expected:
                save_and_wait()
    assert [path.parent.name for path in tmp_path.glob("checkpoints/step-*/manifest.json")] == ["step-2"]


@pytest.mark.ranks(2)
def test_drift_of_every_model_that_an_optimizer_trains_is_told_every_n_steps() -> None:
    with accelerator_of(sections={"ddp": {"check_drift_every": 2}}) as accelerator:
        one, other = nn.Linear(2, 2), nn.Linear(2, 1)
        both = SGD([*one.parameters(), *other.parameters()], lr=0.1)
        one, other, optimizer = accelerator.prepare(one, other, both)
        with torch.no_grad():
            accelerator.unwrap_model(other).weight += accelerator.process_index
        with pytest.raises(DriftedReplicasError, match="weight of Linear differs on ranks 1 from rank 0"):
            take_steps(accelerator, one, optimizer, lambda _: other(one(torch.ones(1, 2))).sum(), range(2))
