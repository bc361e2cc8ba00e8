"""A slow rank is found and named; noise is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_throughput import find_straggler

USUAL = {"data": 0.02, "forward": 0.1, "backward": 0.2, "optimizer": 0.03, "other": 0.01}


@st.composite
def noisy_ranks(draw: st.DrawFn, least: int = 1) -> list[dict[str, float]]:
    """Ranks of which each phase is within 5 % of the usual time."""
    num = draw(st.integers(least, 40))
    noise = st.floats(0.95, 1.05)
    return [{phase: seconds * draw(noise) for phase, seconds in USUAL.items()} for _ in range(num)]


@given(noisy_ranks())
def test_noise_of_five_per_cent_is_no_straggler(ranks: list[dict[str, float]]) -> None:
    assert find_straggler(ranks) is None


@given(noisy_ranks(least=2), st.data(), st.sampled_from(["data", "forward", "optimizer", "other"]))
def test_a_rank_that_is_late_is_named_though_the_others_wait_as_long(
    ranks: list[dict[str, float]], data: st.DataObject, phase: str
) -> None:
    slow = data.draw(st.integers(0, len(ranks) - 1))
    late = data.draw(st.floats(0.15, 10))
    for rank, phases in enumerate(ranks):
        phases[phase if rank == slow else "backward"] += late
    found = find_straggler(ranks)
    assert found is not None
    assert (found.rank, found.phase) == (slow, phase)
    assert found.slower_by == pytest.approx(late, abs=0.02)
    assert found.usual_seconds == pytest.approx(USUAL[phase], rel=0.06)


@given(noisy_ranks(least=2), st.floats(0.2, 10))
def test_a_wait_inside_forward_does_not_hide_a_late_batch(ranks: list[dict[str, float]], late: float) -> None:
    for phases in ranks[1:]:
        phases["forward"] += late  # a backend that shards parameters waits there
    ranks[0]["data"] += late
    found = find_straggler(ranks)
    assert found is not None
    assert (found.rank, found.phase) == (0, "data")


@given(noisy_ranks(least=2), st.data())
def test_a_rank_that_is_slow_in_backward_is_named_where_the_others_communicate_as_long(
    ranks: list[dict[str, float]], data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, len(ranks) - 1))
    late = data.draw(st.floats(0.2, 10))
    for rank, phases in enumerate(ranks):
        phases["backward" if rank == slow else "communication"] = 0.2 + late
    found = find_straggler(ranks)
    assert found is not None
    assert (found.rank, found.phase) == (slow, "backward")


WAITING = ["forward", "backward", "communication"]
BUSY = ["data", "optimizer", "checkpoint", "other"]


@given(st.integers(2, 6), st.data())
def test_a_rank_that_waits_for_others_is_never_named(num: int, data: st.DataObject) -> None:
    """One rank is late in phases of its own, each too short to stand out, and all others wait for it elsewhere."""
    slow = data.draw(st.integers(0, num - 1))
    parts = data.draw(st.lists(st.floats(0.0, 0.04), min_size=len(BUSY), max_size=len(BUSY)))
    where = data.draw(st.sampled_from(WAITING))
    ranks = [dict.fromkeys([*WAITING, *BUSY], 0.1) for _ in range(num)]
    for rank, phases in enumerate(ranks):
        if rank == slow:
            for phase, seconds in zip(BUSY, parts, strict=True):
                phases[phase] += seconds
        else:
            phases[where] += sum(parts)
    found = find_straggler(ranks)
    assert found is None or found.rank == slow


def test_a_long_backward_alone_is_no_straggler_since_its_rank_may_wait_there() -> None:
    ranks = [
        {"forward": 0.3, "backward": 0.1, "other": 0.3},
        {"forward": 0.3, "backward": 0.4, "other": 0.29},
    ]
    assert find_straggler(ranks) is None


def test_ranks_that_all_differ_have_no_straggler() -> None:
    ranks = [{"data": 0.1 * (1 + rank), "forward": 1.0} for rank in range(8)]
    assert find_straggler(ranks) is None


def test_a_large_part_of_nothing_is_no_straggler() -> None:
    assert find_straggler([{"data": 1e-6, "forward": 1.0}, {"data": 1e-3, "forward": 1.0}]) is None


@pytest.mark.parametrize("ranks", [[], [{"data": 1.0}], [{}, {}]])
def test_without_two_ranks_or_time_there_is_none(ranks: list[dict[str, float]]) -> None:
    assert find_straggler(ranks) is None


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_seconds_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"rank 1 spent .* seconds in 'data': must be finite, 0 or more"):
        find_straggler([{"data": 1.0}, {"data": seconds}])
