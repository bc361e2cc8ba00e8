from itertools import combinations

from drivetrain_doctor.links.link_results import GroupResult, PairResult, judge_hosts, judge_ranks


def pair(
    first: int, second: int, rate: float = 1e9, back: float | None = None, late: float = 50e-6
) -> PairResult:
    return PairResult(
        first=first,
        second=second,
        latency_seconds=late,
        forward_bytes_per_second=rate,
        backward_bytes_per_second=rate if back is None else back,
    )


NAMES = ["host 0 (a)", "host 1 (b)", "host 2 (c)", "host 3 (d)"]


def result(**changed: PairResult) -> GroupResult:
    pairs = {f"p{one}{two}": pair(one, two) for one, two in combinations(range(4), 2)}
    return GroupResult(backend="gloo", pairs=tuple((pairs | changed).values()))


def test_equal_links_are_fine_and_their_range_is_shown() -> None:
    report = judge_hosts(result(), NAMES)
    assert report.findings == []
    assert report.summary == "6 pairs: 1.00 GB/s to 1.00 GB/s, latency 50 to 50 us"


def test_a_link_that_is_slow_in_one_direction_is_named_with_both_rates() -> None:
    (finding,) = judge_hosts(result(p12=pair(1, 2, back=50e6)), NAMES).findings
    assert finding.what == "the link host 1 (b) - host 2 (c) is slow: 50.00 MB/s; 1.00 GB/s is usual"
    assert finding.severity == "warning"
    assert "switch" in finding.repair


def test_a_slow_host_is_named_with_its_rate() -> None:
    slow = {f"p{min(3, other)}{max(3, other)}": pair(other, 3, rate=1e8) for other in range(3)}
    (finding,) = judge_hosts(result(**slow), NAMES).findings
    assert finding.what == "host 3 (d) is slow: 100.00 MB/s to the others; 1.00 GB/s is usual"
    assert "on host 3 (d): ethtool" in finding.repair


def test_a_host_that_answers_late_is_named_but_noise_is_not() -> None:
    late = {f"p{other}3": pair(other, 3, late=20e-3) for other in range(3)}
    (finding,) = judge_hosts(result(**late), NAMES).findings
    assert finding.what == "the latency of host 3 (d) is 20,000 us; 50 us is usual"
    assert judge_hosts(result(p01=pair(0, 1, late=300e-6)), NAMES).findings == []


def test_islands_are_named_with_the_rate_between_them() -> None:
    between = {f"p{one}{two}": pair(one, two, rate=1e8) for one in (0, 1) for two in (2, 3)}
    (finding,) = judge_hosts(result(**between), NAMES).findings
    assert (
        "2 islands (host 0 (a), host 1 (b) | host 2 (c), host 3 (d)): 100.00 MB/s between them"
        in finding.what
    )


def test_two_hosts_have_one_link_which_is_judged_by_its_rate_alone() -> None:
    slow = GroupResult(backend="gloo", pairs=(pair(0, 1, rate=10e6),))
    (finding,) = judge_hosts(slow, NAMES[:2]).findings
    assert finding.what == "hosts exchange only 10.00 MB/s over gloo"
    assert "80.0 s" in finding.why
    assert judge_hosts(GroupResult(backend="gloo", pairs=(pair(0, 1),)), NAMES[:2]).findings == []


def test_a_rank_in_every_unfinished_pair_is_named_alone() -> None:
    stuck = GroupResult(backend="gloo", pairs=(pair(0, 1),), unfinished=((0, 2), (1, 2)))
    (finding,) = judge_hosts(stuck, NAMES[:3]).findings
    assert finding.severity == "error"
    assert finding.what == "gloo messages to or from host 2 (c) did not arrive in time"


def test_one_unfinished_pair_names_both_ends() -> None:
    (finding,) = judge_hosts(GroupResult(backend="gloo", unfinished=((0, 2),)), NAMES).findings
    assert "host 0 (a) and host 2 (c)" in finding.what


def test_ranks_that_fail_alike_are_one_finding() -> None:
    failed = GroupResult(backend="nccl", failures={0: "no device", 1: "no device"})
    (finding,) = judge_ranks(failed).findings
    assert finding.what == "nccl fails on rank 0, rank 1: no device"


def test_ranks_of_one_host_may_differ() -> None:
    assert judge_ranks(result(p12=pair(1, 2, rate=1e7))).findings == []
