from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from drivetrain_doctor.links.pair_order import pair_rounds


@given(count=st.integers(0, 40))
def test_each_pair_meets_once_and_no_rank_twice_in_a_round(count: int) -> None:
    rounds = pair_rounds(count, most_rounds=1000)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)


def test_a_few_rounds_of_many_are_spread_and_leave_no_rank_out() -> None:
    rounds = pair_rounds(1000, most_rounds=32)
    assert len(rounds) == len(set(rounds)) == 32
    assert {rank for pair in rounds[0] for rank in pair} == set(range(1000))


def test_pairs_of_one_host_are_measured_one_after_another() -> None:
    assert pair_rounds(3, most_rounds=28, at_once=False) == (((1, 2),), ((0, 2),), ((0, 1),))
