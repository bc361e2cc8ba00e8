"""Clipping by an engine, which clips once, as it steps."""

from math import inf
from typing import Any

import pytest
import torch
from torch.optim import SGD

from deepspeed_backend.engines import Weights, backend, error_of, weights

X = torch.tensor([1.0, 2.0, 3.0])
NORM = 14**0.5
LARGE = 1e9
WAYS = [
    (0, "no", None),
    (1, "no", None),
    (1, "bf16", None),
    (2, "no", None),
    (2, "no", "cpu"),
    (3, "no", None),
]


def clipped(stage: int, mode: str, offload: Any) -> list[list[float]]:
    """For pairs of clips: the norms that they found, and how far the step after them moved the weights."""
    found: list[list[float]] = []
    with backend(stage=stage, mode=mode, offload_optimizer=offload) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        for bounds in [(0.1, LARGE), (inf, 0.1), (0.3, 0.2), (LARGE,)]:
            before = torch.tensor(weights(prepared))
            one.window.begin()
            prepared.backward(prepared.model(X))
            norms = [float(prepared.clip(norm=bound)) for bound in bounds]  # pyright: ignore[reportArgumentType]
            prepared.optimizers[0].step()
            found.append([*norms, (torch.tensor(weights(prepared)) - before).norm().item()])
    return found


@pytest.mark.parametrize(("stage", "mode", "offload"), WAYS)
def test_a_second_clip_finds_what_the_first_left_and_loosens_nothing(
    run_ranks, stage: int, mode: str, offload: Any
) -> None:
    for found in run_ranks(clipped, stage, mode, offload, num_processes=2):
        assert found == [
            pytest.approx([NORM, 0.1, 0.1], rel=1e-4),
            pytest.approx([NORM, NORM, 0.1], rel=1e-4),
            pytest.approx([NORM, 0.3, 0.2], rel=1e-4),
            pytest.approx([NORM, NORM], rel=1e-4),
        ]


def to_nothing() -> str:
    with backend(stage=2) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        one.window.begin()
        prepared.backward(prepared.model(X))
        return error_of(ValueError, lambda: prepared.clip(norm=0.0))


@pytest.mark.slow
def test_a_norm_of_zero_which_deepspeed_takes_for_no_clipping_is_refused(run_ranks) -> None:
    assert "clip(norm=0.0): it must be above 0" in run_ranks(to_nothing, num_processes=1)[0]
