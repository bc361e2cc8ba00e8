"""Seeds and generator states, beside the installed Accelerate."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain_accelerate.randomness import set_seed, synchronize_rng_state, synchronize_rng_states
from drivetrain_accelerate.states.partial_state import PartialState

real: Any = pytest.importorskip("accelerate.utils.random")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    PartialState._reset_state()


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1])
def test_a_seed_gives_the_numbers_that_it_gives_in_accelerate(seed: int) -> None:
    real.set_seed(seed)
    theirs = drawn()
    set_seed(seed)
    assert drawn() == theirs


def test_deterministic_kernels_are_switched_on() -> None:
    set_seed(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="seed=-1"):
        set_seed(-1)


def test_kinds_that_are_unknown_or_not_there_are_named() -> None:
    with pytest.raises(ValueError, match="'bad' is not a valid RNGType"):
        synchronize_rng_states(["bad"])
    with pytest.raises(ValueError, match="rng_type='generator': give the generator"):
        synchronize_rng_states(["generator"])
    with pytest.raises(ValueError, match="rng_type='mlu': this process has no mlu device"):
        synchronize_rng_states(["mlu"])
    synchronize_rng_state(None)


def _on_two_ranks() -> dict[str, Any]:
    state = PartialState(cpu=True)
    try:
        set_seed(5, device_specific=True)
        specific = drawn()
        torch.manual_seed(state.process_index)
        generator = torch.Generator().manual_seed(state.process_index)
        synchronize_rng_states(["torch", "generator"], generator)
        same = torch.rand(1).item(), torch.rand(1, generator=generator).item()
        return {"specific": specific, "same": same}
    finally:
        PartialState._reset_state()


def test_ranks_draw_different_numbers_or_the_same_ones(run_ranks: Any) -> None:
    first, second = run_ranks(_on_two_ranks)
    set_seed(6)
    assert second["specific"] == drawn() != first["specific"]
    torch.manual_seed(0)
    expected = torch.rand(1).item(), torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    assert first["same"] == second["same"] == expected
