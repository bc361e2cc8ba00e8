"""A run that Accelerate saved on two processes, taken over by each backend on two ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from accelerate_layout import write_accelerate_state
from drivetrain import Accelerator

BATCHES = torch.arange(96.0).reshape(6, 8, 2) / 96  # each of two ranks trains on half of one


class Tied(nn.Module):
    """A model with a tied weight, buffers, and layers that two ranks do not divide evenly."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(2, 3)
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.register_buffer("factor", torch.full((3,), float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(self.first(x)))) * self.factor


def built(seed: int) -> tuple[nn.Module, Optimizer, LRScheduler]:
    model = Tied(seed)
    groups = [
        {"params": [model.first.weight, model.inner.weight], "weight_decay": 0.1},
        {"params": [model.outer.bias, model.first.bias, model.inner.bias], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=0.05)
    return model, optimizer, StepLR(optimizer, 2)


def plain_steps(
    model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, batches: torch.Tensor
) -> list[float]:
    losses: list[float] = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def goes_on(folder: str, project_dir: str, backend: str) -> tuple[list[float], float, int]:
    """Take the folder over, make a step, save, resume that, make the rest; losses, a random number, the last step."""
    name, _, stage = backend.partition("-")
    sections = {"run": {"show_plan": False}} | ({"deepspeed": {"stage": int(stage)}} if stage else {})
    losses: list[float] = []
    drawn = 0.0
    for start, batches in ((3, BATCHES[3:4]), (4, BATCHES[4:])):
        with Accelerator(backend=name, cpu=True, project_dir=project_dir, sections=sections) as accelerator:
            model, optimizer, scheduler = accelerator.prepare(*built(seed=2))
            assert accelerator.load_state(folder if start == 3 else None) == start
            drawn = drawn or torch.rand(()).item()
            for batch in batches:
                loss = model(batch.chunk(2)[accelerator.process_index]).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.save_state()
            last = optimizer.num_steps
    return losses, drawn, last


@pytest.mark.parametrize(
    ("backend", "safe"),
    [
        ("ddp", True),
        ("ddp", False),
        ("fsdp", True),
        ("fsdp", False),
        ("deepspeed-0", True),
        ("deepspeed-2", True),
        ("deepspeed-3", False),
    ],
)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.slow
def test_the_next_losses_are_those_of_one_process_that_went_on(
    run_ranks, tmp_path: Path, backend: str, safe: bool
) -> None:
    model, optimizer, scheduler = built(seed=1)
    plain_steps(model, optimizer, scheduler, BATCHES[:3])
    folder = write_accelerate_state(
        tmp_path / "checkpoint_0",
        models=[model.state_dict()],
        optimizers=[optimizer.state_dict()],
        schedulers=[scheduler.state_dict()],
        world_size=2,
        safe=safe,
    )
    expected = plain_steps(model, optimizer, scheduler, BATCHES[3:])
    found = run_ranks(goes_on, str(folder), str(tmp_path / "project"), backend, timeout_seconds=150)
    for rank, (losses, drawn, last) in enumerate(found):
        assert losses == pytest.approx(expected, abs=2e-6)
        assert drawn == torch.rand((), generator=torch.Generator().manual_seed(rank)).item()
        assert last == 6


def refused(folder: str) -> tuple[str, bool]:
    with Accelerator(backend="ddp", cpu=True) as accelerator:
        model, *_ = accelerator.prepare(*built(seed=2))
        before = [p.clone() for p in model.parameters()]
        try:
            accelerator.load_state(folder)
        except (ValueError, RuntimeError) as error:
            return str(error), all(map(torch.equal, before, model.parameters()))
    raise AssertionError("it was taken over")


def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(run_ranks, tmp_path: Path) -> None:
    model, optimizer, scheduler = built(seed=1)
    plain_steps(model, optimizer, scheduler, BATCHES[:1])
    write_accelerate_state(
        tmp_path, models=[model.state_dict()], optimizers=[optimizer.state_dict()], world_size=2
    )
    for said, is_unchanged in run_ranks(refused, str(tmp_path)):
        assert "holds 0 schedulers, and this run has 1" in said
        assert is_unchanged
