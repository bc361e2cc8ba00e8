"""Clipping by an engine, which clips once, as it steps."""

from math import inf
from typing import Any

import pytest
import torch

from deepspeed_engines import X, engine_of, weights

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


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "mode", "offload"), WAYS)
@pytest.mark.default_cases("3-no-None")
def test_a_second_clip_finds_what_the_first_left_and_loosens_nothing(
    stage: int, mode: str, offload: Any
) -> None:
    with engine_of(stage=stage, mode=mode, offload_optimizer=offload) as (_, _, prepared):
        for bounds, norms, way in (
            ((0.1, LARGE), (NORM, 0.1), 0.1),
            ((inf, 0.1), (NORM, NORM), 0.1),
            ((0.3, 0.2), (NORM, 0.3), 0.2),
            ((LARGE,), (NORM,), NORM),
        ):
            before = torch.tensor(weights(prepared))
            prepared.backward(prepared.model(X))
            assert [float(prepared.clip(norm=bound)) for bound in bounds] == pytest.approx(norms, rel=1e-4)
            prepared.optimizers[0].step()
            went = torch.tensor(weights(prepared)) - before
            assert went.norm().item() == pytest.approx(way, rel=1e-4)


@pytest.mark.slow
@pytest.mark.ranks(1)
def test_a_norm_of_zero_which_deepspeed_takes_for_no_clipping_is_refused() -> None:
    with engine_of(stage=2) as (_, _, prepared):
        prepared.backward(prepared.model(X))
        with pytest.raises(ValueError, match=r"clip\(norm=0\.0\): it must be above 0"):
            prepared.clip(norm=0.0)
