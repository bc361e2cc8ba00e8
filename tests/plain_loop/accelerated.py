"""Accelerators on the CPU of this process or rank, and a user's loop with them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator

QUIET: dict[str, Any] = {"run": {"show_plan": False}}
ON_TWO = pytest.mark.ranks(2)
# A parameter of tests whose body runs on as many ranks as the backend wants.
SINGLE, DDP, FSDP = (
    pytest.param(kind, marks=pytest.mark.ranks(1 if kind == "single" else 2), id=kind)
    for kind in ("single", "ddp", "fsdp")
)


def accelerator_of(backend: str = "usual", *, sections: Any = None, **options: Any) -> Accelerator:
    """Return an Accelerator that prints nothing; `deepspeed-3` is DeepSpeed in stage 3, `usual` names no backend."""
    name, _, stage = backend.partition("-")
    own = {"deepspeed": {"stage": int(stage)}} if stage else {}
    named = None if name == "usual" else name
    return Accelerator(cpu=True, backend=named, sections={**QUIET, **own, **(sections or {})}, **options)


def take_steps(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    loss_of: Callable[[int], Tensor],
    micro_batches: Iterable[int],
    *,
    clip: float | None = None,
) -> list[float]:
    """Train on the loss of each micro-batch of this rank; return the losses."""
    losses: list[float] = []
    for number in micro_batches:
        with accelerator.accumulate(model):
            loss = loss_of(number)
            accelerator.backward(loss)
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights_of(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Return the full weights, the same on every rank. Called on all ranks."""
    return accelerator.get_state_dict(model, everywhere=True)


def assert_equal_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compare weights bit by bit."""
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=0)
