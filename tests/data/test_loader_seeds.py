import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from drivetrain_data import PermutationSampler, own_seed, seed_at

DATA = torch.arange(10)


class Held(Sampler[int]):
    """A sampler that draws from a generator of any kind."""

    def __init__(self, generator: Any) -> None:
        self.inside = {"generator": generator}

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(DATA)))

    def __len__(self) -> int:
        return len(DATA)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "build",
    [
        lambda g: DataLoader(DATA, shuffle=True, generator=g),
        lambda g: DataLoader(DATA, generator=g),
        lambda g: DataLoader(DATA, sampler=RandomSampler(DATA, generator=g)),
        lambda g: DataLoader(DATA, sampler=SubsetRandomSampler([1, 2], generator=g)),
        lambda g: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10, generator=g)),
        lambda g: DataLoader(
            DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=g), 2, drop_last=False)
        ),
        lambda g: DataLoader(DATA, sampler=Held(g)),
    ],
)
def test_the_first_draw_from_a_generator_is_what_it_was_seeded_with(
    build: Callable[[torch.Generator], DataLoader[Any]],
) -> None:
    generator = seeded(7)
    first, second, third = (own_seed(build(generator)) for _ in range(3))
    assert first == 7
    assert len({first, second, third}) == 3  # loaders that share one, or are prepared again, go on in it
    again = seeded(7)
    assert [own_seed(build(again)) for _ in range(3)] == [first, second, third]
    assert own_seed(build(seeded(-1))) == 2**63 - 1


def test_a_generator_that_was_drawn_from_goes_on() -> None:
    generator = seeded(7)
    torch.randperm(4, generator=generator)
    assert own_seed(DataLoader(DATA, shuffle=True, generator=generator)) not in (7, None)


@pytest.mark.parametrize(
    "make",
    [np.random.default_rng, np.random.RandomState, random.Random],
    ids=["numpy", "old numpy", "python"],
)
def test_generators_of_other_libraries_count(make: Callable[[int], Any]) -> None:
    seeds = [own_seed(DataLoader(DATA, sampler=Held(make(seed)))) for seed in (3, 3, 4)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


def test_several_generators_count_together() -> None:
    seeds = [own_seed(DataLoader(DATA, sampler=Held([seeded(1), seeded(n)]))) for n in (2, 2, 3)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_samplers_with_a_seed_of_their_own_bring_it() -> None:
    def distributed(seed: int) -> DataLoader[Any]:
        return DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=1, seed=seed))  # pyright: ignore[reportArgumentType]

    assert own_seed(distributed(5)) == 5
    assert own_seed(distributed(0)) is None  # torch's default says nothing
    assert own_seed(DataLoader(DATA, sampler=PermutationSampler(10, seed=4))) == 4


def test_global_generators_are_nobodys_own() -> None:
    before = torch.get_rng_state()
    assert own_seed(DataLoader(DATA, shuffle=True)) is None
    assert own_seed(DataLoader(DATA, sampler=Held(torch.default_generator))) is None
    assert own_seed(DataLoader(DATA, shuffle=True, generator=torch.default_generator)) is None
    assert own_seed([1, 2]) is None
    assert torch.equal(before, torch.get_rng_state())


def test_places_share_no_seed() -> None:
    assert seed_at(7, 0) == 7
    assert len({seed_at(seed, place) for seed in range(20) for place in range(20)}) == 400
