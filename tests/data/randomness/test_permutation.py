import math
from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_data import Permutation
from drivetrain_data.randomness import permutation
from drivetrain_data.randomness.permutation import ORDER_VERSION, hash_key

keys = st.tuples(st.integers(0, 2**63), st.integers(0, 2**31))


def whole(order: Permutation) -> list[int]:
    return order.at(np.arange(len(order))).tolist()


@given(size=st.integers(0, 3000), key=keys)
def test_every_index_comes_once(size: int, key: tuple[int, int]) -> None:
    assert sorted(whole(Permutation(size, *key))) == list(range(size))


@pytest.mark.parametrize("size", [2**20 + 1, 2**20 + 2**19, 2**21])
def test_every_index_comes_once_without_a_table(size: int) -> None:
    indices = Permutation(size, 3, 1).at(np.arange(size))
    assert np.array_equal(np.sort(indices), np.arange(size))


@given(size=st.integers(2**20 + 1, 2**62), key=keys, position=st.integers(0, 2**62))
def test_any_position_of_any_size_is_in_range(size: int, key: tuple[int, int], position: int) -> None:
    assert 0 <= Permutation(size, *key)[position % size] < size


@given(size=st.sampled_from([1, 5, 1000, 2**20, 2**20 + 7, 10**12]), key=keys, data=st.data())
@pytest.mark.slow
def test_an_index_does_not_depend_on_what_else_is_asked(
    size: int, key: tuple[int, int], data: st.DataObject
) -> None:
    ordered = Permutation(size, *key)
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    block = ordered.at(np.array(positions)).tolist()
    assert block == [ordered[position] for position in positions]


def test_the_published_orders_never_change() -> None:
    assert ORDER_VERSION == 1
    assert whole(Permutation(12, 0, 0)) == GOLDEN[12]
    assert Permutation(1000, 42, 3).at(np.arange(8)).tolist() == GOLDEN[1000]
    assert Permutation(2**20 + 1, 0, 0).at(np.arange(6)).tolist() == GOLDEN[2**20 + 1]
    assert Permutation(10**12, 7, 1).at(np.arange(4)).tolist() == GOLDEN[10**12]
    assert Permutation(2**62, 2**63 - 1, 0).at(np.array([0, 2**61, 2**62 - 1])).tolist() == GOLDEN[2**62]


GOLDEN = {
    12: [4, 7, 2, 11, 5, 6, 8, 9, 0, 3, 1, 10],
    1000: [571, 851, 575, 215, 956, 6, 108, 304],
    2**20 + 1: [837094, 970064, 34542, 214150, 975037, 100319],
    10**12: [830419690257, 206557739017, 628508139560, 58813455604],
    2**62: [1168292453548362798, 102321003807827175, 253407920533948784],
}


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
@pytest.mark.default_cases("2", "5")
def test_all_orders_of_few_samples_are_equally_likely(size: int) -> None:
    counts = dict.fromkeys(permutations(range(size)), 0)
    rounds = 60 * len(counts)
    for epoch in range(rounds):
        counts[tuple(whole(Permutation(size, 11, epoch)))] += 1
    expected = rounds / len(counts)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    freedom = len(counts) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1000, 2**20 + 3])
@pytest.mark.parametrize("step", [1, 2, 64])
def test_neighbours_are_as_far_apart_as_in_torch_randperm(size: int, step: int) -> None:
    ours = Permutation(size, 5, 9).at(np.arange(size))
    torchs = torch.randperm(size, generator=torch.Generator().manual_seed(5)).numpy()
    # The distance of two random places is size / 3 on average, with a deviation of size / sqrt(18).
    tolerance = 6 * size / math.sqrt(18 * size)
    for order in (ours, torchs):
        assert abs(np.abs(order[step:] - order[:-step]).mean() - size / 3) < tolerance


@pytest.mark.parametrize("size", [1000, 2**20 + 3])
def test_neighbouring_epochs_and_seeds_have_nothing_in_common(size: int) -> None:
    positions = np.arange(size)
    base = Permutation(size, 5, 9).at(positions)
    for key in [(5, 10), (6, 9), (9, 5)]:
        other = Permutation(size, *key).at(positions)
        assert (base == other).sum() < 12  # a random order has one index in place on average
        assert abs(np.corrcoef(base, other)[0, 1]) < 6 / math.sqrt(size)


@pytest.mark.parametrize("size", [1000, 2**20 + 3])
def test_indices_are_uniform_over_any_stretch(size: int) -> None:
    first = Permutation(size, 1, 1).at(np.arange(size // 2))
    counts, _ = np.histogram(first, bins=50, range=(0, size))
    expected = len(first) / 50
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 6 * math.sqrt(98)


def parity(order: npt.NDArray[np.int64]) -> int:
    """0 where an even number of exchanges makes the order."""
    seen, num_cycles = np.zeros(len(order), dtype=bool), 0
    for start in range(len(order)):
        if not seen[start]:
            num_cycles += 1
            while not seen[start]:
                seen[start], start = True, order[start]
    return (len(order) - num_cycles) % 2


@pytest.mark.parametrize("without_a_table", [False, True])
@pytest.mark.parametrize("size", [32, 64, 65, 100, 1024])
@pytest.mark.default_cases("32-True", "64-False", "65-False")
def test_odd_orders_are_as_likely_as_even_ones(
    size: int, without_a_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_a_table:
        monkeypatch.setattr(permutation, "_TABLE_LIMIT", 0)
    num_odd = sum(parity(Permutation(size, seed, 0).at(np.arange(size))) for seed in range(400))
    assert abs(num_odd - 200) < 4 * 10  # standard deviations


def test_key_parts_are_not_confused() -> None:
    keys = [(1, 2), (2, 1), (12,), (1, 2, 0), (1 + 2**64, 2), (1, 2 + 2**64)]
    assert len({hash_key(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Permutation(-1), ValueError, "a permutation orders 0 to"),
        (lambda: Permutation(2**62 + 1), ValueError, "a permutation orders 0 to"),
        (lambda: Permutation(3, 0)[3], IndexError, "position 3 of a permutation of 3"),
        (lambda: Permutation(3, -1), ValueError, "key part -1"),
    ],
)
def test_what_is_out_of_range_is_refused(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
