import os
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_config.environ import child_environment
from drivetrain_doctor.links.link_measurement import PairOrder, pair_rounds, result_of, start_pairs


@pytest.fixture
def preloaded(python: str) -> Iterator[None]:
    """Have programs that are started by `sys.executable` begin with torch imported."""
    before, sys.executable = sys.executable, python
    yield
    sys.executable = before


def order(folder: Path, **changes: object) -> PairOrder:
    told = {"backend": "gloo", "world_size": 3, "ranks": (0, 1, 2), "store_path": str(folder / "store")}
    return PairOrder(**{**told, "limit_seconds": 60.0, **changes})  # type: ignore[arg-type]


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_three_ranks_measure_each_pair_over_gloo(tmp_path: Path) -> None:
    with start_pairs(child_environment(GLOO_SOCKET_IFNAME=None)) as program:
        result = program.measure(order(tmp_path))
    assert result.failures == {}
    assert sorted((pair.first, pair.second) for pair in result.pairs) == [(0, 1), (0, 2), (1, 2)]
    assert all(0 < pair.latency_seconds < 10 for pair in result.pairs)
    assert all(1e5 < pair.bytes_per_second < 1e12 for pair in result.pairs)
    assert result.unfinished == ()


@pytest.mark.slow  # the variable makes it a fresh interpreter
@pytest.mark.usefixtures("preloaded")
def test_an_interface_that_is_not_there_fails_as_in_a_run(tmp_path: Path) -> None:
    with start_pairs(child_environment(GLOO_SOCKET_IFNAME="nowhere0")) as program:
        result = program.measure(order(tmp_path))
    assert len(result.failures) == 3
    assert "nowhere0" in "".join(result.failures.values())


@pytest.mark.usefixtures("preloaded")
@pytest.mark.slow
def test_a_rank_that_never_comes_ends_within_the_limit(tmp_path: Path) -> None:
    with start_pairs(child_environment()) as program:
        result = program.measure(order(tmp_path, world_size=3, ranks=(0, 1), limit_seconds=2.0))
    assert sorted(result.failures) == [0, 1]


@pytest.mark.usefixtures("preloaded")
def test_a_program_without_an_order_leaves_nothing_behind() -> None:
    with start_pairs(child_environment()) as program:
        pid = program.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_pair_that_began_and_did_not_end_is_unfinished() -> None:
    events = [
        {"event": "joined", "rank": 0, "seconds": 0.5},
        {"event": "joined", "rank": 1, "seconds": 0.7},
        {"event": "begin", "first": 0, "second": 1},
    ]
    result = result_of(PairOrder(backend="gloo", world_size=2, ranks=(0, 1)), events)
    assert (result.unfinished, result.failures, result.start_seconds) == (((0, 1),), {}, 0.7)


def test_a_rank_that_told_nothing_did_not_join() -> None:
    result = result_of(PairOrder(backend="gloo", world_size=1, ranks=(0,), limit_seconds=7), [])
    assert result.failures == {0: "did not join the group within 7 s"}


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
