"""Training one case under a backend and by a plain loop: how far apart they end, or how the case was refused."""

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from sweep.model_cases import ModelCase, loss_of, model_cases
from sweep.optimizer_cases import Make, optimizer_cases

NUM_STEPS, NUM_MICRO_BATCHES, MAX_NORM = 3, 2, 1.0
LEAST_MOVED = 0.01  # of what moved furthest: below, a weight's way is too short for what rounding does to it
SHOW_NOTHING: dict[str, Any] = {"run": {"show_plan": False}}

# The ways to train, each by its backend and sections.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("single", {}),
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "fsdp in blocks": ("fsdp", {"fsdp": {"min_num_params": 1000}}),
    "zero 1": ("deepspeed", {"deepspeed": {"stage": 1}}),
    "zero 2": ("deepspeed", {"deepspeed": {"stage": 2}}),
    "zero 3": ("deepspeed", {"deepspeed": {"stage": 3}}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case.

    Attributes:
        refusal: The message of the error that refused the case; None where it was trained.
        is_meant: Whether our code raised that error, of a kind that tells users what to do.
        difference: The largest difference between a weight of the two loops, as a part of the distance that this
            weight moved; 0 where the case was refused.
        worst: The name of the weight that differs most.
    """

    refusal: str | None = None
    is_meant: bool = False
    difference: float = 0.0
    worst: str = ""


def compare(kind: str, name: str, way: str) -> Outcome:
    """Train a case in both ways. Called on all ranks.

    Args:
        kind: "model", with SGD; or "optimizer", on a model of two layers.
        name: The case.
        way: One of `WAYS`.
    """
    if kind == "model":
        case = model_cases()[name]
        make: Make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731 the other is a function too
    else:
        build = _two_larger_layers if name.startswith("torchao") else _two_layers
        case, make = ModelCase(build=build, batch=_points), optimizer_cases()[name]
    backend, sections = WAYS[way]
    expected = case.build()
    before = {key: value.clone() for key, value in expected.state_dict().items()}
    with Accelerator(
        backend=backend,
        cpu=True,
        gradient_accumulation_steps=NUM_MICRO_BATCHES,
        sections={**SHOW_NOTHING, **sections},
    ) as accelerator:
        _train_plainly(expected, case, make, accelerator.num_processes)
        try:
            trained = _train(accelerator, case, make)
        except Exception as error:  # noqa: BLE001 the outcome tells it, and the test judges
            return Outcome(refusal=f"{type(error).__name__}: {error}", is_meant=_is_meant(error))
    return _measure(trained, expected.state_dict(), before)


def _train_plainly(model: nn.Module, case: ModelCase, make: Make, num_shards: int) -> None:
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        num_losses = num_shards * NUM_MICRO_BATCHES
        for number in range(num_losses):
            (_loss(model, case, step * num_losses + number) / num_losses).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def _train(accelerator: Accelerator, case: ModelCase, make: Make) -> dict[str, Tensor]:
    built = case.build()
    model, optimizer = accelerator.prepare(built, make(built.parameters()))
    for micro_batch in range(NUM_STEPS * NUM_MICRO_BATCHES):
        index = micro_batch * accelerator.num_processes + accelerator.process_index
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, case, index))
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model, everywhere=True)


def _loss(model: nn.Module, case: ModelCase, index: int) -> Tensor:
    torch.manual_seed(index)  # some draw numbers in forward: masks, in the main
    return loss_of(model(**case.batch(index)))


def _measure(trained: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor]) -> Outcome:
    floats = [key for key, value in expected.items() if value.is_floating_point()]
    moved = {key: float((expected[key] - before[key]).abs().max()) for key in floats}
    furthest = max(moved.values())
    if not furthest:
        return Outcome(difference=float("inf"), worst="nothing moved: all")
    off = {
        key: float((trained[key] - expected[key]).abs().nan_to_num(torch.inf).max())
        / max(moved[key], furthest * LEAST_MOVED)
        for key in floats
    }
    worst = max(off, key=lambda key: off[key])
    return Outcome(difference=off[worst], worst=worst)


def _is_meant(error: BaseException) -> bool:
    """Tell whether an error was raised by our code on purpose: a KeyError in it would be a mistake of ours."""
    parts = Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts
    return isinstance(error, (ValueError, TypeError, RuntimeError)) and any(
        part.startswith("drivetrain_") for part in parts
    )


def _two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))  # 8-bit states begin at 4096


def _two_larger_layers() -> nn.Module:
    """Return a model of which a half of the first weight has 8-bit states too, in whole blocks of 256.

    A shard of fewer than 4096 elements would be trained in fp32, closer to AdamW than the plain loop is. Two ranks
    have shards of the same shape: torch 2.15 gives a rank what another one compiled for a shard of another shape.
    """
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 6))


def _points(index: int) -> dict[str, Any]:
    return {"input": torch.randn(16, 64, generator=torch.Generator().manual_seed(index)) * 3}
