"""The Accelerator over FSDP and DeepSpeed: the same loop, one another's checkpoints, a plan that tells."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from plain_loop.accelerated import accelerator_of, take_steps, weights_of

ROUTE = ["ddp", "deepspeed-3", "fsdp", "deepspeed-1", "ddp", "deepspeed-0", "fsdp", "deepspeed-2", "ddp"]


def one_step_more(folder: Path, backend: str, position: int) -> dict[str, Tensor]:
    """Go on from the newest checkpoint for one step, save, and return the weights."""
    with accelerator_of(backend, seed=0, project_dir=folder) as accelerator:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.0}]
        data = TensorDataset(torch.arange(180.0).reshape(60, 3) / 180)
        model, optimizer, loader = accelerator.prepare(
            model, AdamW(groups, lr=0.05), DataLoader(data, batch_size=2, shuffle=True)
        )
        if position:
            assert accelerator.load_state() == position
        (x,) = next(iter(loader))
        take_steps(
            accelerator,
            model,
            optimizer,
            lambda _: (model(x) - x.sum(1, keepdim=True)).square().mean(),
            [0],
            clip=1.0,
        )
        accelerator.save_state()
        return weights_of(accelerator, model)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout_seconds=150)
@pytest.mark.usefixtures("deepspeed_operators")
def test_a_checkpoint_goes_from_backend_to_backend_with_its_optimizer(tmp_path: Path) -> None:
    for position, backend in enumerate(ROUTE):
        found = one_step_more(tmp_path / "mixed", backend, position)
        expected = one_step_more(tmp_path / "plain", "ddp", position)
        torch.testing.assert_close(
            found, expected, rtol=0, atol=2e-6, msg=f"step {position + 1} by {backend}"
        )


@pytest.mark.ranks(1)
def test_the_plan_shows_the_whole_configuration_and_what_was_chosen(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1}}
    with accelerator_of(
        "deepspeed",
        project_dir=tmp_path,
        gradient_accumulation_steps=2,
        sections={"deepspeed": {"config": config}},
    ) as accelerator:
        model = nn.Linear(1, 1)
        accelerator.prepare(model, AdamW(model.parameters()), DataLoader(torch.ones(8, 1), batch_size=4))
    settings = json.loads((tmp_path / "plan.json").read_text())["settings"]
    found = settings["deepspeed.config"]["applied"]
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["gradient_accumulation_steps"] == 2
    assert found["gradient_clipping"] == 0.0
    assert settings["deepspeed.stage"]["applied"] == 1
    assert settings["deepspeed.stage"]["reason"] == "of deepspeed.config"


MISSING = """
import sys
sys.modules["deepspeed"] = None  # as where it is not installed
from drivetrain import Accelerator
Accelerator(backend="deepspeed", cpu=True)
"""


def test_deepspeed_that_is_not_installed_is_named_with_its_extra(run_ranks_script) -> None:
    (run,) = run_ranks_script(MISSING, num_processes=1)
    assert run.returncode == 1
    assert "pip install 'drivetrain[deepspeed]'" in run.stderr
