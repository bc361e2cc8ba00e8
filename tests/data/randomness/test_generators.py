import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from drivetrain_data.randomness.generators import KeyedDraws, load_plain_states, plain_states
from drivetrain_data.state.sampler_parts import seed_own_generators


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_draws_depend_on_the_key_alone_and_are_not_felt_outside() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    undisturbed = draw()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    seen = []
    for key in [(1, 2), (1, 2), (1, 3)]:
        with KeyedDraws(*key).active():
            seen.append(draw())
    assert seen[0] == seen[1] != seen[2]
    assert draw() == undisturbed


def test_the_next_block_goes_on_where_the_last_stopped() -> None:
    draws = KeyedDraws(1)
    with draws.active():
        first = draw()
    with draws.active():
        second = draw()
    with KeyedDraws(1).active():
        assert [draw(), draw()] == [first, second]


def test_generators_inside_wrapped_samplers_are_seeded() -> None:
    inner = RandomSampler(range(50), generator=torch.Generator())
    batches = BatchSampler(inner, 5, drop_last=False)
    seed_own_generators(batches, 1, 2)
    first = list(batches)
    seed_own_generators(batches, 1, 2)
    assert list(batches) == first
    seed_own_generators(batches, 1, 3)
    assert list(batches) != first


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_states_of_the_global_generators_pass_through_json(kind) -> None:
    outside = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(kind(3))
        random.gauss()  # half of a pair is kept
        np.random.randn()
        state = json.loads(json.dumps(plain_states()))
        first = [*draw(), random.gauss(), np.random.randn()]
        load_plain_states(state)
        assert [*draw(), random.gauss(), np.random.randn()] == first
    finally:
        np.random.set_bit_generator(outside)
