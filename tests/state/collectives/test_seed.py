import logging
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_state import (
    StateSettings,
    connect,
    derive_seed,
    deterministic_algorithms,
    load_rng_state,
    reseed,
    rng_state,
    set_seed,
    synchronize_rng_states,
)


def _draw() -> tuple[float, ...]:
    return (
        random.random(),
        float(np.random.random()),
        torch.rand(1).item(),
        np.random.normal(),
        random.gauss(0, 1),
    )


def test_a_seed_repeats_every_generator() -> None:
    set_seed(3)
    first = _draw()
    set_seed(3)
    assert _draw() == first
    set_seed(4)
    assert all(new != old for new, old in zip(_draw(), first, strict=True))


def test_a_seed_is_torchs_own_seed() -> None:
    assert set_seed(7) == 7
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(1))


def test_ranks_that_want_it_draw_different_numbers() -> None:
    draws = [(set_seed(1, rank_offset=rank), _draw())[1] for rank in range(4)]
    assert len(set(draws)) == 4
    assert set_seed(1, rank_offset=1) != 2


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"^seed={seed}: "):
        set_seed(seed)


seeds, ranks, steps = st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(0, 10**9)


@given(seeds, ranks, steps)
def test_derived_seeds_are_a_function_that_every_generator_takes(seed: int, rank: int, step: int) -> None:
    derived = derive_seed(seed, rank=rank, step=step)
    assert derived == derive_seed(seed, rank=rank, step=step)
    assert 0 <= derived < 2**63
    assert derived != derive_seed(seed, rank=rank + 1, step=step)
    assert derived != derive_seed(seed, rank=rank, step=step + 1)


def test_derived_seeds_never_change_between_releases() -> None:
    assert derive_seed(0, rank=0) == 3642583908639835580
    assert derive_seed(42, rank=3, step=1000) == 2743206005292487214


def test_reseeding_repeats_what_follows() -> None:
    assert reseed(5, rank=1, step=30) == derive_seed(5, rank=1, step=30)
    first = _draw()
    reseed(5, rank=1, step=30)
    assert _draw() == first
    reseed(5, rank=0, step=30)
    assert _draw() != first


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (int, float, str) or isinstance(value, torch.Tensor)


def test_a_state_is_plain_and_brings_every_generator_back() -> None:
    set_seed(11)
    _draw()  # leaves a half of a Gaussian pair behind
    state = rng_state()
    assert _is_plain(state)
    expected = _draw()
    set_seed(12)
    load_rng_state(state)
    assert _draw() == expected


def test_a_state_of_another_accelerator_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    state = {"accelerator": {"kind": "npu", "state": torch.zeros(16, dtype=torch.uint8)}}
    with caplog.at_level(logging.WARNING):
        load_rng_state(state)
    assert "the state holds the generator of npu, but the accelerator here is " in caplog.text


def _synchronized(kinds: tuple[str, ...]) -> tuple[float, ...]:
    context = connect(StateSettings(device="cpu", watchdog=False))
    set_seed(1, rank_offset=context.topology.rank)
    synchronize_rng_states(context, kinds)
    return random.random(), float(np.random.random()), torch.rand(1).item()


@pytest.mark.parametrize("kinds", [("python", "numpy", "torch"), ("torch",)])
def test_every_rank_gets_the_generators_of_the_main_one_that_are_asked_for(
    run_ranks, kinds: tuple[str, ...]
) -> None:
    first, second = run_ranks(_synchronized, kinds)
    are_equal = [one == other for one, other in zip(first, second, strict=True)]
    assert are_equal == [kind in kinds for kind in ("python", "numpy", "torch")]


def test_an_unknown_kind_is_refused() -> None:
    context = connect(StateSettings(device="cpu", watchdog=False))
    with pytest.raises(ValueError, match="kinds='cuda': known kinds are python, numpy, torch, accelerator"):
        synchronize_rng_states(context, ("cuda",))


def test_deterministic_kernels_only_while_inside() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms():
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_deterministic_context_ends_with_its_close() -> None:
    with connect(StateSettings(device="cpu", deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_seeding_deterministically_leaves_it_on() -> None:
    try:
        set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
