from hypothesis import given
from hypothesis import strategies as st

from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_doctor.meeting.clock import ClockOffset, estimate_offset, judge_clocks

NAMES = {1: "host 1 (b)", 2: "host 2 (c)"}
seconds = st.floats(0, 0.5)


@given(
    offset=st.floats(-1000, 1000),
    ways=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5),
)
def test_the_bound_holds_whatever_the_ways_take(offset: float, ways: list[tuple[float, float]]) -> None:
    samples = [(offset, there, offset + there + back) for there, back in ways]
    found = estimate_offset(samples)
    assert abs(found.seconds - offset) <= found.bound_seconds + 1e-9
    assert found.bound_seconds <= min(sum(way) for way in ways) / 2 + 1e-9


def test_a_clock_that_is_off_is_named_with_direction_and_bound() -> None:
    near = ClockOffset(seconds=0.01, bound_seconds=0.001)
    off = ClockOffset(seconds=-90.0, bound_seconds=0.004)
    (finding,) = judge_clocks({1: near, 2: off}, NAMES).findings
    assert finding.severity == "warning"
    assert finding.what == "the clock of host 2 (c) is 90.0 s behind that of host 0 (+- 0.004 s)"
    assert "on host 2 (c): timedatectl set-ntp true" in finding.repair


def test_minutes_break_signed_requests() -> None:
    (finding,) = judge_clocks({1: ClockOffset(seconds=3600, bound_seconds=0.1)}, NAMES).findings
    assert finding.severity == "error"
    assert "ahead of" in finding.what


def test_an_offset_within_its_bound_is_none() -> None:
    assert judge_clocks({1: ClockOffset(seconds=1.5, bound_seconds=0.9)}, NAMES).findings == []


def test_nobody_answered() -> None:
    assert judge_clocks({}, NAMES) == CheckReport("no other host answered", is_skipped=True)
