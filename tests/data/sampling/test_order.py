from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_data.sampling.order import ReplacementOrder, SequentialOrder, ShuffledOrder, SubsetOrder

epochs = st.integers(0, 5)


def whole(order, epoch: int = 0) -> list[int]:
    return order.take(epoch, np.arange(order.length(epoch)))


@given(size=st.integers(1, 200), rounds=st.integers(1, 4), extra=st.integers(0, 50), epoch=epochs)
def test_more_positions_than_samples_are_one_permutation_after_the_other(size, rounds, extra, epoch) -> None:
    order = ShuffledOrder(size, seed=1, num_positions=rounds * size + extra)
    taken = whole(order, epoch)
    for start in range(0, rounds * size, size):
        assert sorted(taken[start : start + size]) == list(range(size))
    assert max(Counter(taken).values()) <= rounds + -(-extra // size)
    assert taken[:size] == whole(ShuffledOrder(size, seed=1), epoch)


@given(indices=st.lists(st.integers(0, 10**6), max_size=50), epoch=epochs)
def test_a_subset_keeps_its_samples(indices: list[int], epoch: int) -> None:
    assert sorted(whole(SubsetOrder(indices, seed=2), epoch)) == sorted(indices)


def test_draws_with_replacement_are_uniform_and_differ_by_epoch_and_seed() -> None:
    order = ReplacementOrder(10, seed=3, num_positions=20_000)
    counts = Counter(whole(order))
    assert sorted(counts) == list(range(10))
    assert all(abs(count - 2000) < 6 * 2000**0.5 for count in counts.values())
    assert whole(order, 0) != whole(order, 1)
    assert whole(order, 0) != whole(ReplacementOrder(10, seed=4, num_positions=20_000))


def test_orders_say_what_they_are() -> None:
    assert SequentialOrder(3, seed=0).name == "sequential"
    assert ShuffledOrder(3, seed=0).name == "shuffled/1"
    assert SubsetOrder([1], seed=0).name == "subset-shuffled/1"
    assert ReplacementOrder(3, seed=0, num_positions=3).name == "replacement/1"
