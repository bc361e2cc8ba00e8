"""The Accelerator over FSDP and DeepSpeed: the same loop, one another's checkpoints, a plan that tells."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain_backends import NonFiniteGradientError, full_state_dict

ROUTE = ["ddp", "deepspeed-3", "fsdp", "deepspeed-1", "ddp", "deepspeed-0", "fsdp", "deepspeed-2", "ddp"]


def one_step_more(project_dir: str, backend: str, position: int) -> dict[str, list[float]]:
    """Go on from the newest checkpoint for one step, save, and give the weights."""
    name, _, stage = backend.partition("-")
    sections = {"deepspeed": {"stage": int(stage)}} if stage else None
    with Accelerator(
        backend=name, cpu=True, seed=0, project_dir=project_dir, sections=sections
    ) as accelerator:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.0}]
        optimizer = AdamW(groups, lr=0.05)
        data = TensorDataset(torch.arange(180.0).reshape(60, 3) / 180)
        loader = DataLoader(data, batch_size=2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if position:
            assert accelerator.load_state() == position
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            break
        accelerator.save_state()
        state = full_state_dict(accelerator._parts.prepared.of(model).state_dict()["model"])
        return {key: value.flatten().tolist() for key, value in state.items()}


def walk(project_dir: str, route: list[str]) -> list[dict[str, list[float]]]:
    return [one_step_more(project_dir, backend, position) for position, backend in enumerate(route)]


@pytest.mark.slow
def test_a_checkpoint_goes_from_backend_to_backend_with_its_optimizer(run_ranks, tmp_path: Path) -> None:
    mixed = run_ranks(walk, str(tmp_path / "mixed"), ROUTE, num_processes=2, timeout_seconds=150)
    plain = run_ranks(
        walk, str(tmp_path / "plain"), ["ddp"] * len(ROUTE), num_processes=2, timeout_seconds=150
    )
    for step, (ours, expected) in enumerate(zip(mixed[0], plain[0], strict=True)):
        for name, value in expected.items():
            assert ours[name] == pytest.approx(value, abs=2e-6), f"{name} after step {step + 1}"
    assert mixed[0] == mixed[1]


class Tied(nn.Module):
    """A model with a tied weight, a buffer, and layers that two ranks do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.outer(torch.tanh(self.inner(x))))


def exported(backend: str, everywhere: bool) -> dict[str, list[float]]:
    """Train for a step and export the weights."""
    name, _, stage = backend.partition("-")
    sections = {"run": {"show_plan": False}} | ({"deepspeed": {"stage": int(stage)}} if stage else {})
    with Accelerator(backend=name, cpu=True, sections=sections) as accelerator:
        torch.manual_seed(0)
        model = Tied()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.arange(12.0).reshape(4, 3)).square().sum())
        optimizer.step()
        state = accelerator.get_state_dict(model, everywhere=everywhere)
        assert not state or state["outer.weight"] is state["inner.weight"]
        if state:
            Tied().load_state_dict(state)
        assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in state.values())
        return {key: value.flatten().tolist() for key, value in state.items()}


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed-0", "deepspeed-2", "deepspeed-3"])
@pytest.mark.default_cases("fsdp")
def test_exported_weights_are_those_of_ddp_whole_on_the_main_process_or_everywhere(
    run_ranks, backend: str
) -> None:
    (expected, elsewhere) = run_ranks(exported, "ddp", False)
    assert elsewhere == {}
    (found, elsewhere) = run_ranks(exported, backend, False, timeout_seconds=150)
    assert elsewhere == {}
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name
    assert run_ranks(exported, backend, True, timeout_seconds=150) == [found, found]


def guarded(nonfinite: str) -> list[object]:
    """A good step, one whose loss is NaN on rank 1, a good step, each clipped."""
    with Accelerator(
        backend="fsdp", cpu=True, sections={"run": {"nonfinite_gradients": nonfinite}}
    ) as accelerator:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        found: list[object] = []
        for factor in (1.0, float("nan") if accelerator.process_index == 1 else 1.0, 1.0):
            accelerator.backward(model(torch.ones(2, 3)).mean() * factor)
            try:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            except NonFiniteGradientError as error:
                return [*found, str(error)]
            found.append(accelerator.optimizer_step_was_skipped)
            optimizer.zero_grad()
        with torch.no_grad():
            return [*found, model(torch.ones(1, 3)).isfinite().item()]


def test_fsdp_skips_a_step_that_is_not_finite_on_all_ranks(run_ranks) -> None:
    assert run_ranks(guarded, "skip", num_processes=2) == [[False, True, False, True]] * 2


def test_fsdp_names_the_gradient_that_is_not_finite(run_ranks) -> None:
    for first, said in run_ranks(guarded, "raise", num_processes=2):
        assert first is False
        assert "the gradient of weight holds an infinity or NaN" in said
        assert "a loss of rank 1 was not finite" in said


def told(project_dir: str) -> dict[str, object]:
    with Accelerator(
        backend="deepspeed",
        cpu=True,
        project_dir=project_dir,
        gradient_accumulation_steps=2,
        sections={"deepspeed": {"config": {"zero_optimization": {"stage": 1}}}},
    ) as accelerator:
        model = nn.Linear(1, 1)
        loader = DataLoader(torch.ones(8, 1), batch_size=4)
        accelerator.prepare(model, AdamW(model.parameters()), loader)
    return json.loads((Path(project_dir) / "plan.json").read_text())["settings"]


def test_the_plan_shows_the_whole_configuration_and_what_was_chosen(run_ranks, tmp_path: Path) -> None:
    (settings,) = run_ranks(told, str(tmp_path), num_processes=1)
    config = settings["deepspeed.config"]["applied"]
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 0.0
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
