"""Saves in the background whose copies are made until the next step: what is trained meanwhile is not in them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain_checkpoint import ChangedWhileCopiedError

OVERLAP = {"checkpoint": {"background": True, "staging": "overlap"}}


def model() -> nn.Module:
    """Large enough for copies to take a while, with buffers that a forward changes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 512), nn.BatchNorm1d(512), nn.Linear(512, 512), nn.Linear(512, 1))


class Run:
    """A run that saves in the background."""

    def __init__(self, folder: Path, backend: str = "single", **options: Any) -> None:
        sections = {**OVERLAP, **options.pop("sections", {})}
        self.accelerator = Accelerator(
            cpu=True, backend=backend, project_dir=folder, sections=sections, **options
        )
        plain = model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
        self.model, self.optimizer = self.accelerator.prepare(plain, optimizer)

    def forward_and_backward(self) -> None:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(self.optimizer.num_steps))
        self.accelerator.backward(self.model(x).square().mean())

    def step(self) -> None:
        self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        whole = self.accelerator.get_state_dict(self.model, everywhere=True)
        return {name: value.clone() for name, value in whole.items()}


def assert_saves_hold_what_was(run: Run) -> None:
    for _ in range(2):
        run.step()
        before = run.state()
        run.accelerator.save_state()
        run.step()
        after_one = run.state()
        run.step()
        run.accelerator.load_state()
        assert same(run.state(), before)
        run.step()
        assert same(run.state(), after_one)  # the optimizer's state came back too
    run.accelerator.end_training()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_waits_until_its_weights_are_copied(tmp_path: Path) -> None:
    assert_saves_hold_what_was(Run(tmp_path))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("backend", "sections"), [("ddp", {}), ("fsdp", {"fsdp": {"wrap": ["Linear"]}})])
@pytest.mark.default_cases("fsdp")
def test_parts_of_ranks_are_copied_until_the_next_step(tmp_path: Path, backend: str, sections: dict) -> None:
    assert_saves_hold_what_was(Run(tmp_path, backend, sections=sections))


@pytest.mark.slow
@pytest.mark.ranks(2, timeout_seconds=170)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parts_of_engines_are_copied_until_the_next_step(stage: int, tmp_path: Path) -> None:
    assert_saves_hold_what_was(Run(tmp_path, "deepspeed", sections={"deepspeed": {"stage": stage}}))


def test_micro_batches_of_an_open_window_wait_for_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, gradient_accumulation_steps=2)
    for _ in range(2):
        with run.accelerator.accumulate(run.model):
            run.step()
    before = run.state()
    run.accelerator.save_state()
    for _ in range(4):
        with run.accelerator.accumulate(run.model):
            run.step()
    run.accelerator.load_state()
    assert same(run.state(), before)
    run.accelerator.end_training()


def test_whatever_else_changes_weights_waits_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step()
    before = run.state()
    run.accelerator.save_state()
    with run.accelerator.gathered(run.model, write=True), torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.accelerator.load_state()
    assert same(run.state(), before)
    run.step()
    run.accelerator.save_model(run.model, tmp_path / "export")
    run.accelerator.load_state()
    run.accelerator.save_state()
    run.accelerator.load_model(run.model, tmp_path / "export")
    run.accelerator.load_state()
    assert same(run.state(), before)
    run.accelerator.save_state()
    run.accelerator.free_memory()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.accelerator.wait_for_save()
    run.accelerator.end_training()


def test_weights_that_change_outside_a_step_are_told_and_not_committed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step()
    run.accelerator.save_state(background=False)
    run.step()
    before = run.state()

    def save_and_change() -> None:
        for _ in range(50):  # how far the copies are is a matter of time
            run.accelerator.save_state()
            with torch.no_grad():
                for parameter in reversed(list(run.model.parameters())):
                    parameter.add_(0)
            run.accelerator.wait_for_save()

    with pytest.raises(ChangedWhileCopiedError, match=r"changed while it was copied .* staging='copy'"):
        save_and_change()
    assert same(run.state(), before)
    assert run.accelerator.load_state() in (1, 2)
    run.accelerator.end_training()
