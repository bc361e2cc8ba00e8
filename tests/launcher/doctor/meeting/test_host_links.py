from dataclasses import asdict

from drivetrain_launcher.doctor.links.pair_results import GroupResult, PairResult, judge_hosts
from drivetrain_launcher.doctor.meeting.host_links import merge


def told(*pairs: tuple[int, int], unfinished: tuple[tuple[int, int], ...] = ()) -> dict:  # type: ignore[type-arg]
    measured = tuple(
        PairResult(
            first=first,
            second=second,
            latency_seconds=1e-4,
            forward_bytes_per_second=1e9,
            backward_bytes_per_second=1e9,
        )
        for first, second in pairs
    )
    return asdict(GroupResult(backend="gloo", pairs=measured, unfinished=unfinished, failures={}))


def test_each_host_tells_the_pairs_whose_lower_rank_it_is() -> None:
    result = merge("gloo", {0: told((0, 1), (0, 2)), 3: told((1, 2)), 5: told()}, [0, 3, 5])
    assert sorted((pair.first, pair.second) for pair in result.pairs) == [(0, 1), (0, 2), (1, 2)]
    assert judge_hosts(result, ["host 0", "host 3", "host 5"]).findings == ()


def test_a_host_that_told_nothing_failed() -> None:
    result = merge("gloo", {0: told(unfinished=((0, 1),))}, [0, 4])
    assert result.failures == {1: "told nothing in time"}
    assert result.unfinished == ((0, 1),)
