"""Who is named where backends gather parameters or average gradients inside forward and backward."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from logged_messages import messages_of
from plain_loop.accelerated import accelerator_of
from plain_loop.case import own_rank

SECONDS = (
    0.15  # a twentieth of a step, from which on a difference counts, exceeds the noise of a busy machine
)
NUM_STEPS, EVERY = 6, 3


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, seconds: tuple[float, float]) -> Tensor:
        ctx.seconds = seconds[1]
        time.sleep(seconds[0])
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """A layer that sleeps before it computes, and in backward before its gradients are done."""

    def __init__(self, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(Sleep.apply(x, self.seconds))


def warnings_with_a_slow_rank(backend: str, where: str, block: int, sections: dict[str, Any]) -> list[str]:
    """Train on two ranks, of which rank 1 is slow in a block's forward or backward; return this rank's warnings."""
    late = (SECONDS, 0.0) if where == "forward" else (0.0, SECONDS)
    is_slow = os.environ.get("RANK") == "1"
    model = nn.Sequential(
        *(Block(late if is_slow and number == block else (0.0, 0.0)) for number in range(3))
    )
    sections = {**sections, "tracking": {"throughput_every_steps": EVERY}}
    with (
        messages_of("drivetrain_throughput.rank_throughput") as warnings,
        accelerator_of(backend, sections=sections) as accelerator,
    ):
        model, optimizer, loader = accelerator.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            DataLoader(TensorDataset(torch.randn(2 * 2 * NUM_STEPS, 8).requires_grad_()), batch_size=2),
        )
        for (x,) in loader:
            accelerator.backward(model(x.requires_grad_()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return warnings


def train_until(holds: Callable[[list[str]], bool], *arguments: Any) -> list[str]:
    """Train once, or again where the machine has held a rank up elsewhere; return the warnings of the last time."""
    told, answers = list[str](), [False]
    for _ in range(3):
        if not all(answers):
            told, answers = warnings_with_a_slow_rank(*arguments), [False] * dist.get_world_size()
            dist.all_gather_object(answers, holds(told))
    return told


def named_ranks(warnings: list[str]) -> set[str]:
    """The ranks that rank 0 names; the others tell nothing."""
    assert own_rank() == 0 or not warnings
    return {warning.partition(" (")[0] for warning in warnings}


RANK_1 = [{"rank 1"}, set()]  # what each rank names


@pytest.mark.undisturbed
@pytest.mark.ranks(2)
@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.default_cases("0")
def test_ddp_names_the_rank_that_is_slow_in_backward(block: int) -> None:
    def holds(told: list[str]) -> bool:
        # A rank that the machine held up elsewhere is slow too, and named for it.
        in_backward = [warning for warning in told if "is slow: backward takes it" in warning]
        return named_ranks(in_backward) == RANK_1[own_rank()]

    told = train_until(holds, "ddp", "backward", block, {})
    assert holds(told), told


BY_BLOCK = {"fsdp": {"wrap": ["Block"]}}


@pytest.mark.undisturbed
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("sections", "block"), [({}, 0), ({}, 2), (BY_BLOCK, 2)])
@pytest.mark.default_cases("sections0-0")
def test_fsdp_names_the_rank_that_is_slow_behind_the_last_gather_of_a_forward(
    sections: dict, block: int
) -> None:
    def holds(told: list[str]) -> bool:
        return named_ranks(told) == RANK_1[own_rank()] and all("is slow: forward" in each for each in told)

    told = train_until(holds, "fsdp", "forward", block, sections)
    assert holds(told), told


@pytest.mark.undisturbed
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sections", "where", "block"),
    [(BY_BLOCK, "forward", 0), (BY_BLOCK, "backward", 0), (BY_BLOCK, "backward", 2), ({}, "backward", 0)],
)
@pytest.mark.default_cases("sections0-forward-0")
def test_fsdp_never_names_a_rank_that_waits(sections: dict[str, Any], where: str, block: int) -> None:
    told = train_until(lambda told: named_ranks(told) <= {"rank 1"}, "fsdp", where, block, sections)
    assert named_ranks(told) <= {"rank 1"}, told


def communication_while_rank_1_comes_late_to_the_step() -> float:
    sections = {"run": {"show_plan": False}, "tracking": {"throughput": True}}
    with Accelerator(cpu=True, backend="fsdp", sections=sections) as accelerator:
        model = nn.Linear(8, 8)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(3):
            accelerator.backward(model(torch.ones(2, 8)).sum())
            time.sleep(SECONDS if os.environ["RANK"] == "1" else 0.0)
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.total_throughput.phase_seconds["communication"]


def test_fsdp_waits_for_the_others_in_communication_when_it_steps(run_ranks) -> None:
    waiting, late = run_ranks(communication_while_rank_1_comes_late_to_the_step)
    assert waiting > late + SECONDS / 2


@pytest.mark.undisturbed
@pytest.mark.slow
@pytest.mark.ranks(2, timeout_seconds=150)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_zero_never_names_a_rank_that_waits(where: str, stage: int) -> None:
    def holds(told: list[str]) -> bool:
        # Up to stage 1, engines average gradients after backward: all of backward is a rank's own.
        named = named_ranks(told)
        return named == RANK_1[own_rank()] if stage == 1 else named <= {"rank 1"}

    told = train_until(holds, f"deepspeed-{stage}", where, 1, {})
    assert holds(told), told
