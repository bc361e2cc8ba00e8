"""Training one case under a backend and by a plain loop: how far apart they end, or how the case was refused."""

import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plain_loop.accelerated import accelerator_of, take_steps, weights_of
from plain_loop.case import Case, run_plain
from sweep.model_cases import ModelCase, loss_of, model_cases
from sweep.optimizer_cases import Make, optimizer_cases

NUM_STEPS, NUM_MICRO_BATCHES, MAX_NORM = 3, 2, 1.0
LEAST_MOVED = 0.01  # of what moved furthest: below, a weight's way is too short for what rounding does to it

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
    with accelerator_of(
        backend, gradient_accumulation_steps=NUM_MICRO_BATCHES, sections=sections
    ) as accelerator:
        num_ranks, rank = accelerator.num_processes, accelerator.process_index

        def loss(model: nn.Module, rank: int, number: int) -> Tensor:
            index = number * num_ranks + rank
            torch.manual_seed(index)  # some draw numbers in forward: masks, in the main
            return loss_of(model(**case.batch(index)))

        plain = Case(
            build=case.build,
            loss=loss,
            optimizer=make,
            steps=NUM_STEPS,
            accumulation=NUM_MICRO_BATCHES,
            clip={"norm": MAX_NORM},
        )
        (expected,) = run_plain(plain, num_ranks).weights
        built = case.build()
        before = {key: value.clone() for key, value in built.state_dict().items()}
        try:
            model, optimizer = accelerator.prepare(built, make(built.parameters()))
            numbers = range(NUM_STEPS * NUM_MICRO_BATCHES)
            take_steps(accelerator, model, optimizer, partial(loss, model, rank), numbers, clip=MAX_NORM)
            trained = weights_of(accelerator, model)
        except Exception as error:  # noqa: BLE001 the outcome tells it, and the test judges
            return Outcome(refusal=f"{type(error).__name__}: {error}", is_meant=_is_meant(error))
    return _measure(trained, expected, before)


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
